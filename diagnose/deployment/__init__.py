"""How a server was launched: its flags, and what its page says of them."""
