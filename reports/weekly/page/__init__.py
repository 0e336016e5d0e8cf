"""The weekly report for people: as a single HTML file that loads nothing else, and as Markdown.
Pure."""

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.page.markdown import render_markdown

__all__ = ["render", "render_markdown"]
