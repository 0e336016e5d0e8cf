"""Which series of a page is what: vLLM's names by version and prefix, DCGM's fields by GPU."""
