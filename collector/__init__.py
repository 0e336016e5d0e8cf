"""Where numbers come from: pages, captures, names, windows, signals."""
