"""Grafana dashboards and Prometheus rules for a fleet, built from the catalogue."""
