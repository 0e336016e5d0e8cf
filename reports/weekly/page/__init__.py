"""The weekly report for people: a single HTML file that loads nothing else, or Markdown. Pure."""

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.page.markdown import render_markdown

__all__ = ["render", "render_markdown"]
