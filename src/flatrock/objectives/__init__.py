"""Level 1: robust training losses, pure functions of the network passes they ask for."""
