"""What to change about a live server, and what that would do. Pure."""
