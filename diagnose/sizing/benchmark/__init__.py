"""An operating point from a measured sweep: points, curve, knee, trust. Pure."""
