"""The weekly report for people: a single HTML file that loads nothing else, or Markdown. Pure."""
