"""The cheapest launch that meets the targets, and why others do not. Pure."""
