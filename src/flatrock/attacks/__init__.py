"""Level 1: attacks. A model and inputs in, perturbed inputs inside the threat out."""
