"""Level 3: records in, tables and figures out; reads what runs left behind, never a model."""
