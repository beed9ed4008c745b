"""Level 2: training. A Job in, epoch records and checkpoints out."""
