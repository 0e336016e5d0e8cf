"""The embedded history: one SQLite file."""
