"""Level 1: the optimizers: SGD, AdamW, and those whose update is itself a flatness method."""
