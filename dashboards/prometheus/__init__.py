"""Recording and alerting rules for Prometheus, from the catalogue that the sidecar uses."""
