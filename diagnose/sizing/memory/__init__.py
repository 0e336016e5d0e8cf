"""What a launch holds: weights, overhead, KV cache, prefixes, and moving them. Pure."""
