"""Grafana dashboards for the recorded signals: described as data, and built with Grafana's
own SDK."""
