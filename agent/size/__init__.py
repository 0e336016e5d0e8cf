"""The `size` command."""
