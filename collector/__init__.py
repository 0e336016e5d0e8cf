"""Reading metrics: pages, captures, metric names, windows and signals."""
