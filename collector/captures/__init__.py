"""Recorded pages: gzipped JSON lines, readable after a kill or damage, and while still growing."""
