"""Causes: their records, their evidence and their ranking."""
