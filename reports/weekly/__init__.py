"""The weekly report: what a fleet did, what it needs, what it costs. Pure."""
