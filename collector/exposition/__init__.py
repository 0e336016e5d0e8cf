"""Exposition text to samples: the grammar of a line, the body of a page, and the page parser."""
