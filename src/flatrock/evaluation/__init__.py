"""Level 2: a model and a list of attacks in, a Result with its findings out."""
