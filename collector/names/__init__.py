"""Identifies a page's series: vLLM's metrics by version and prefix, DCGM's fields by GPU."""
