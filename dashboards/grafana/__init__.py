"""Grafana dashboards for the recorded signals, described as data. `make docs` builds their JSON
with Grafana's own SDK (tests/dashboards/boards.py)."""
