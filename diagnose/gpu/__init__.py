"""GPU signals and GPU health."""
