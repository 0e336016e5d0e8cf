"""Settings: the table, where values come from, and the flags."""
