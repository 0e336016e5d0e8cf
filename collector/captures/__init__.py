"""Recordings of pages: gzip of JSON lines that survive a kill, damage and growth while read."""
