"""Recording and alerting rules for Prometheus, built from the catalogue that the sidecar uses."""
