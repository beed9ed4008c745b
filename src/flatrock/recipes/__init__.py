"""Level 3: recipes. Text in, a validated Recipe out; a Recipe in, a Job, a model or a Result out."""
