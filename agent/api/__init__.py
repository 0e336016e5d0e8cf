"""The HTTP endpoint: triage, metrics, alerts, sizing."""
