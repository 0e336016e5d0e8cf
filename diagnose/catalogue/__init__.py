"""Facts about GPUs and models: data files with a source for every entry."""
