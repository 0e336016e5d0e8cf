"""How many replicas carry a load, and what they cost."""
