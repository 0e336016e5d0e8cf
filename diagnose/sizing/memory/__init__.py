"""The memory of a launch: weights, overhead, KV cache, and reuse of KV. Pure."""
