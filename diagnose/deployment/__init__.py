"""How a server was launched: its flags, and the configuration that its page shows."""
