"""Level 1: networks that take [0, 1] inputs, and the features and logits of any of them."""
