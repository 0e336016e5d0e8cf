"""Every record against itself: Python and PromQL conclude alike, and each number matters."""
