"""Level 1: flatness methods, each a small object with up to four hooks into the training step."""
