"""Watches and diagnoses one engine."""
