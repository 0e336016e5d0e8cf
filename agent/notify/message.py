"""The content of notifications (a headline, and one part per engine or alert), and its formats.
Pure.

All text of a `Message` is raw, because names and summaries come from other machines. Each format
escapes the text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from email.utils import formatdate
from hashlib import sha256
from math import ceil
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from kneewatch.diagnose.fleet.verdict import FLEET
from kneewatch.reports.diagnosis_text import escaped
from kneewatch.rules.formatting import clock, cut, cut_after_sentence, date

SCHEMA = "kneewatch.notification/1"
FIRING, RESOLVED, UNWATCHED = "firing", "resolved", "unwatched"


class Line(Struct, frozen=True):
    """A line of a part. `label` needs no escaping. `code` is a flag or command; it is shown before
    `text`."""

    label: str
    text: str
    code: str = ""

    def plain(self) -> str:
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.code}. {self.text}".strip() if self.code else f"{label}{self.text}"


class Part(Struct, frozen=True):
    """A section of a message: a title, lines, and links to the triage page and to the cause's page.
    A link is "" if its address is unknown."""

    title: str
    lines: tuple[Line, ...] = ()
    link: str = ""
    docs: str = ""

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The known links: pairs of link text and URL."""
        named = (("triage", self.link), ("runbook", self.docs))
        return tuple((words, url) for words, url in named if url)


class Message(Struct, frozen=True, kw_only=True):
    """A notification. `id` stays the same when the message is sent again. `events` are records of
    JSON documents, or JSON objects."""

    id: str
    status: str
    severity: str
    t_s: float
    headline: str
    parts: tuple[Part, ...]
    more: str = ""
    source: str = "kneewatch"
    events: tuple[object, ...] = ()


def link(base: str, target: str, at_s: float | None = None) -> str:
    """The URL of a target's triage page, now or at `at_s`; of all pools for a fleet as a whole. ""
    without a base URL."""
    if not base:
        return ""
    query = [f"target={quote(target, safe='')}"] if target != FLEET else []
    if at_s is not None:
        whole_s = ceil(at_s)  # so that the page has the scrape of that moment
        query.append(f"at={date(whole_s)}T{clock(whole_s)}Z")
    return "?".join(filter(None, (f"{base}/triage", "&".join(query))))


def identity(*parts: object) -> str:
    """A short hash of the parts, in hexadecimal."""
    return sha256("\0".join(map(str, parts)).encode("utf-8", "replace")).hexdigest()[:20]


# --- Escaping of untrusted text -------------------------------------------------------------------


BREAK = "\u200b"
"""A zero-width space: it breaks @mentions and automatic links. Addresses lose their scheme instead,
so that they can be copied."""

SCHEME = re.compile(r"(?<![A-Za-z0-9])https?://(?=\w|\[)", re.IGNORECASE)
LINKS = re.compile(
    r"://|\]\(|(?<![A-Za-z0-9])(?:www|mailto|tel|javascript|data)(?=[.:])", re.IGNORECASE
)
MENTIONS = re.compile("@")
SLACK_MARKUP = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "*": "\u2217", "~": "\u223c", "`": "'"}
)
"""Characters that are replaced for Slack. &, < and > are escaped, as Slack requires. Slack's markup
characters cannot be escaped, so similar characters replace them (asterisk operator, tilde
operator)."""


def escape_mail(text: str, most: int) -> str:
    """The text on one line, cut to `most` characters. Addresses lose their scheme and other links
    are broken, so that mail programs do not make them clickable."""
    return LINKS.sub(_broken, SCHEME.sub("", cut_after_sentence(text, most)))


def escape_plain(text: str, most: int) -> str:
    """The text on one line, cut to `most` characters. Links and mentions are broken, so that
    programs do not activate them."""
    return MENTIONS.sub(_broken, escape_mail(text, most))


def escape_slack(text: str, most: int) -> str:
    """The same as `escape_plain`, for Slack's mrkdwn and for compatible programs that use
    Markdown."""
    return escape_plain(text, most).translate(SLACK_MARKUP)


def escape_markdown(text: str, most: int) -> str:
    """The same as `escape_plain`, for Markdown."""
    plain = SCHEME.sub("", cut_after_sentence(text, most))
    return MENTIONS.sub(_broken, LINKS.sub(_broken, escaped(plain)))


def escape_html(text: str, most: int) -> str:
    """The same as `escape_mail`, for HTML text and attributes."""
    return html.escape(escape_mail(text, most), quote=True)


def _broken(match: re.Match[str]) -> str:
    token = match.group()
    return token[0] + BREAK + token[1:] if token in ("://", "](") else token + BREAK


# --- Messages as Slack JSON, webhook JSON, text and e-mail ----------------------------------------


HEADLINE_MAX, LINE_MAX, SUBJECT_MAX = 240, 400, 160
SECTION_MAX = 2900
"""Maximum number of characters in a section. Slack's limit is 3,000."""

Escape = Callable[[str, int], str]


def slack(message: Message) -> dict[str, Any]:
    """The body for an incoming webhook of Slack or a compatible program.

    Slack shows the blocks; `verbatim` stops Slack from linking URLs and names. Compatible programs
    show the text.
    """
    sections = [f"*{escape_slack(message.headline, HEADLINE_MAX)}*"]
    sections += [_slack_part(part) for part in message.parts]
    if message.more:
        sections.append(escape_slack(message.more, LINE_MAX))
    return {
        "text": "\n".join(sections),
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": section, "verbatim": True}}
            for section in sections
        ],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def webhook(message: Message) -> dict[str, Any]:
    """The body for a webhook: the events as data for programs, and text for people."""
    return {
        "schema": SCHEMA,
        "id": message.id,
        "t": round(message.t_s, 3),
        "status": message.status,
        "severity": message.severity,
        "source": message.source,
        "title": escape_plain(message.headline, HEADLINE_MAX),
        "text": text(message),
        "markdown": markdown(message),
        "events": message.events,
    }


FORMATS: Mapping[str, Callable[[Message], dict[str, Any]]] = {"slack": slack, "webhook": webhook}
"""The format of a message that is sent by HTTP, by the receiver's kind."""


def text(message: Message, escaped: Escape = escape_plain) -> str:
    """A message as plain text."""
    lines = [escaped(message.headline, HEADLINE_MAX)]
    for part in message.parts:
        lines += ["", escaped(part.title, LINE_MAX)]
        lines += [f"  {_line(line, escaped, '')}" for line in part.lines]
        lines += [f"  {url}" for _, url in part.links]
    return "\n".join([*lines, *(["", message.more] if message.more else [])])


def markdown(message: Message) -> str:
    """A message as Markdown."""
    lines = [f"**{escape_markdown(message.headline, HEADLINE_MAX)}**"]
    for part in message.parts:
        title = escape_markdown(part.title, LINE_MAX)
        links = ", ".join(f"[{words}]({url})" for words, url in part.links)
        lines += ["", f"{title} ({links})" if links else title, ""]
        lines += [f"- {_line(line, escape_markdown, '')}" for line in part.lines]
    return "\n".join([*lines, *(["", message.more] if message.more else [])])


def email(message: Message, *, sender: str, recipients: tuple[str, ...]) -> EmailMessage:
    """A message as an e-mail, in plain text and in HTML."""
    mail = EmailMessage()
    mail["Subject"] = cut(f"[kneewatch] {message.headline}", SUBJECT_MAX)
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Date"] = formatdate(message.t_s)
    mail["Message-ID"] = f"<{message.id}@kneewatch.invalid>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(text(message, escape_mail) + "\n")
    mail.add_alternative(_html(message), subtype="html")
    return mail


def _slack_part(part: Part) -> str:
    title = escape_slack(part.title, LINE_MAX)
    # Links need no escape: their bases have no Slack markup and their queries are quoted.
    rows = [" ".join([*(f"<{url}|{words}>" for words, url in part.links), title])]
    size = len(rows[0])
    for line in part.lines:
        row = f"\u2022 {_line(line, escape_slack, '`')}"
        size += len(row) + 1
        if size > SECTION_MAX:
            break
        rows.append(row)
    return "\n".join(rows)


def _line(line: Line, escaped: Escape, quote: str) -> str:
    content = escaped(line.text, LINE_MAX)
    if line.code:
        content = f"{quote}{escaped(line.code, LINE_MAX)}{quote}" + (
            f". {content}" if content else ""
        )
    return f"{line.label}: {content}" if line.label else content


def _html(message: Message) -> str:
    def item(line: Line) -> str:
        words = escape_html(line.text, LINE_MAX)
        code = f"<code>{escape_html(line.code, LINE_MAX)}</code>. " if line.code else ""
        label = f"<b>{html.escape(line.label)}:</b> " if line.label else ""
        return f"<li>{label}{code}{words}</li>"

    rows = [f"<p><b>{escape_html(message.headline, HEADLINE_MAX)}</b></p>"]
    for part in message.parts:
        title = escape_html(part.title, LINE_MAX)
        links = ", ".join(
            f'<a href="{html.escape(url, quote=True)}">{words}</a>' for words, url in part.links
        )
        title += f" ({links})" if links else ""
        rows.append(f"<p>{title}</p>")
        if part.lines:
            rows.append(f"<ul>{''.join(item(line) for line in part.lines)}</ul>")
    if message.more:
        rows.append(f"<p>{html.escape(message.more)}</p>")
    return f"<!DOCTYPE html><html><body>{''.join(rows)}</body></html>\n"
