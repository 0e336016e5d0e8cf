"""A metrics system as a source for reports. Range queries are read in pieces."""
