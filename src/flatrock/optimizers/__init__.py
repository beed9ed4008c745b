"""Level 1: optimizers beyond SGD whose update is itself a flatness method."""
