"""Dashboards and rules for a fleet, built from the catalogue."""
