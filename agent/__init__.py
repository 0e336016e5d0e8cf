"""The program: its commands and settings, and the code that connects all other packages."""
