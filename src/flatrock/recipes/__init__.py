"""Level 3: recipes. Text in, a validated Recipe out; a Recipe in, a Job or a model out."""
