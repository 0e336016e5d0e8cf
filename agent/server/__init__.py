"""Facts about a server, from its HTTP answers and from the node on which it runs."""
