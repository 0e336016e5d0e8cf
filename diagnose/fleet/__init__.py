"""Causes that show only when replicas are compared. Pure."""
