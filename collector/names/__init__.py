"""Identifies the series of a page: vLLM's metrics by version and prefix, DCGM's fields by GPU."""
