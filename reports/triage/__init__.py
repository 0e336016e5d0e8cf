"""The triage page: a verdict, why, since when, and what to change."""
