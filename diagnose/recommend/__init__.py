"""What to change about a live server, and the predicted effect. Pure."""
