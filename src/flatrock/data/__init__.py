"""Level 1: datasets as tensors, their files, the fixed held-out split, augmentation and the loader."""
