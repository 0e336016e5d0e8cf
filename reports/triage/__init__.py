"""The triage page: the verdict, its evidence, its history, and what to change."""
