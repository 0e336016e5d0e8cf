"""Hostile text made harmless for where people read it. Pure.

Model names, labels, errors and alerts come from other machines. Whatever they hold, in a message
they are text: no control characters, no link, no mention, no markup.
"""

from __future__ import annotations

import html
import re

from kneewatch.reports.markdown import escaped
from kneewatch.reports.words import cut

BREAK = "\u200b"
"""A space without width: between an @ and a name there is no mention, within a URL no link."""

LINKS = re.compile(
    r"://|\]\(|(?<![A-Za-z0-9])(?:www|mailto|tel|javascript|data)(?=[.:])", re.IGNORECASE
)
MENTIONS = re.compile("@")
SLACK_MARKUP = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "*": "\u2217", "~": "\u223c", "`": "'"}
)
"""Slack asks for the three of HTML. It has no escape for its own markup: look-alikes take its
place (asterisk operator, tilde operator)."""


def mail(text: str, most: int) -> str:
    """At most so many characters of a text on one line, in which no program finds a link."""
    return LINKS.sub(_broken, cut(text, most))


def plain(text: str, most: int) -> str:
    """The same, and no mention either."""
    return MENTIONS.sub(_broken, mail(text, most))


def slack(text: str, most: int) -> str:
    """The same for Slack's mrkdwn, and for what takes Slack's messages and reads Markdown."""
    return plain(text, most).translate(SLACK_MARKUP)


def markdown(text: str, most: int) -> str:
    """The same for Markdown."""
    return MENTIONS.sub(_broken, LINKS.sub(_broken, escaped(cut(text, most))))


def in_html(text: str, most: int) -> str:
    """A text for the HTML of a mail, also within an attribute."""
    return html.escape(mail(text, most), quote=True)


def _broken(found: re.Match[str]) -> str:
    mark = found.group()
    return mark[0] + BREAK + mark[1:] if mark in ("://", "](") else mark + BREAK
