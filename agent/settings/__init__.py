"""Settings: the table of settings, their sources, and the command line flags."""
