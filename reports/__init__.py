"""Reports: diagnoses as text, Markdown, JSON and HTML."""
