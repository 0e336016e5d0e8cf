"""What is known about a server: asked of it, and read on its node."""
