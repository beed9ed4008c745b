"""Level 2: a trained network in, what it looks like from inside out: loss landscapes, curvature, certified radii."""
