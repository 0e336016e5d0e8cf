"""Exposition text to samples: the grammar of a line, a page's body, and the parser of a target."""
