"""Queries to a metrics system with Prometheus's HTTP API. I/O edge."""
