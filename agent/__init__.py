"""The program: commands, settings, and what wires the rest together."""
