"""Grafana dashboards over the recorded signals: data here, built with Grafana's own SDK."""
