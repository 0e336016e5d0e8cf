"""What is learned about an engine over time."""
