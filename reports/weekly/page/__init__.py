"""The weekly report for people: a single HTML file that loads nothing else, Markdown, or a page of
text. Pure."""

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.page.markdown import render_markdown
from kneewatch.reports.weekly.page.summary import render_summary

__all__ = ["render", "render_markdown", "render_summary"]
