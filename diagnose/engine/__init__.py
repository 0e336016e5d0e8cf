"""Monitors and diagnoses one engine."""
