"""Diagnoses as text, Markdown and JSON."""
