"""An operating point from a measured sweep: points, curve, knee, and doubts. Pure."""
