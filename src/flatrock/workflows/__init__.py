"""Level 4: whole pieces of work. A recipe or a run in; a run, a result, a record or a table of them out."""
