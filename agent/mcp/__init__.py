"""A server of the Model Context Protocol: kneewatch for on-call agents.

It is a process of its own that asks a daemon or a metrics system. The daemon never imports it: the
protocol's SDK costs 64 MiB.
"""
