"""The weekly report for reading: one HTML file that asks for nothing else, and Markdown. Pure."""

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.page.markdown import render_markdown

__all__ = ["render", "render_markdown"]
