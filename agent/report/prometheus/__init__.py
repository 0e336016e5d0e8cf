"""The report's inputs from a metrics system: range queries, read piece by piece."""
