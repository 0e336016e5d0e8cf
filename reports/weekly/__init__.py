"""The weekly report: what a fleet served, which size it needs, and what it costs. Pure."""
