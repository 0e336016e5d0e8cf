"""Queries to a metrics system that speaks Prometheus's HTTP API: I/O edge."""
