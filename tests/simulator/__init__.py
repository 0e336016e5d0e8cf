"""Our own simulator of a vLLM engine: mechanisms in, /metrics pages as vLLM writes them out."""
