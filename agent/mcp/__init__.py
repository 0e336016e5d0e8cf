"""A server for the Model Context Protocol: kneewatch for on-call agents.

It runs as its own process and queries a daemon or a metrics system. The daemon never imports it,
because the SDK of the protocol takes 64 MiB of memory.
"""
