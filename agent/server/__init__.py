"""Facts about a server, from its answers and from its node."""
