"""The content of notifications (a headline, and one part per engine or alert), and its formats.
Pure.

All text of a `Message` is raw, because names and summaries come from other machines. Each format
escapes the text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import formatdate
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from msgspec import Struct

from kneewatch.diagnose.fleet.verdict import FLEET
from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.lines import cut, cut_after_sentence
from kneewatch.rules.formatting import stamp
from kneewatch.rules.rule import CRITICAL, WARNING

if TYPE_CHECKING:
    from kneewatch.agent.notify.events import EventDocument

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
        query.append(f"at={stamp(ceil(at_s))}")  # so that the page has the scrape of that moment
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


# --- Messages as JSON of Slack, Teams and webhooks, text and e-mail -------------------------------


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


def teams(message: Message) -> dict[str, Any]:
    """The body for a webhook of Microsoft Teams (a workflow that posts a card)."""
    heading = {"text": escape_plain(message.headline, HEADLINE_MAX), "weight": "bolder"}
    # A card shows a little Markdown, such as lists and links.
    blocks = [heading, *({"text": words} for words in markdown(message).split("\n\n")[1:])]
    content = {
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "TextBlock", "wrap": True, **block} for block in blocks],
    }
    card = {"contentType": "application/vnd.microsoft.card.adaptive", "content": content}
    return {"type": "message", "attachments": [card]}


FORMATS: Mapping[str, Callable[[Message], dict[str, Any]]] = {
    "slack": slack,
    "teams": teams,
    "webhook": webhook,
}
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
    mail.add_alternative(page(message), subtype="html")
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


def page(message: Message) -> str:
    """A message as an HTML page."""

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


# --- Incidents: what receivers get that keep each problem from its beginning to its end -----------


Requests = Iterator[tuple[str, object]]
"""POST requests: the path below the receiver's URL, and the JSON body."""

CLIENT = "kneewatch"
MESSAGE_MAX, DESCRIPTION_MAX = 130, 15_000
"""Maximum numbers of characters of Opsgenie's fields."""

PRIORITIES: Mapping[str, str] = {CRITICAL.word: "P1", WARNING.word: "P3"}
TEST_S = 300.0
"""Seconds after which Alertmanager's test alert ends."""

LABEL_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


def incidents(message: Message) -> Iterator[tuple[str, str, bool]]:
    """The incidents that a message about one problem opens (True) and closes (False), with their
    ids and severities.

    A pager does not page again when an open incident becomes more severe, so each severity of a
    problem is an incident of its own, and a milder one is closed by the worse one. A test opens an
    incident and closes it.
    """
    if not message.events:
        yield from ((message.id, message.severity, is_open) for is_open in (True, False))
        return
    event = cast("EventDocument", message.events[0])
    marks = (event.target, event.model, event.engine, event.id, f"{event.since_s:.3f}")
    is_over = event.what == "ended"
    yield identity(*marks, event.severity.word), event.severity.word, not is_over
    if event.severity > WARNING and (is_over or event.what == "worse"):
        yield identity(*marks, WARNING.word), WARNING.word, False


def pagerduty(message: Message, key: str) -> Requests:
    """The requests for PagerDuty's Events API v2. `key` is the routing key of an integration."""
    part = message.parts[0]
    details: dict[str, str] = {}
    for line in part.lines:
        label = line.label or "what"
        words = escape_plain(f"{line.code} {line.text}".strip(), LINE_MAX)
        details[label] = "\n".join(filter(None, (details.get(label), words)))
    for incident, severity, is_open in incidents(message):
        action = "trigger" if is_open else "resolve"
        body: dict[str, Any] = {"routing_key": key, "event_action": action, "dedup_key": incident}
        if is_open:
            body |= {
                "client": CLIENT,
                **({"client_url": part.link} if part.link else {}),
                "links": [{"href": url, "text": words} for words, url in part.links],
                "payload": {
                    "summary": escape_plain(message.headline, HEADLINE_MAX),
                    "severity": severity,
                    "source": escape_plain(part.title, HEADLINE_MAX),
                    "custom_details": details,
                },
            }
        yield "/v2/enqueue", body


def opsgenie(message: Message, _key: str) -> Requests:
    """The requests for the alert API of Opsgenie and of Jira Service Management."""
    for incident, severity, is_open in incidents(message):
        body = {"source": CLIENT}
        path = f"/v2/alerts/{incident}/close?identifierType=alias"
        if is_open:
            path = "/v2/alerts"
            body |= {
                "alias": incident,
                "message": escape_plain(message.headline, MESSAGE_MAX),
                "description": text(message)[:DESCRIPTION_MAX],
                "priority": PRIORITIES[severity],
            }
        yield path, body


def alertmanager(message: Message, _key: str) -> Requests:
    """The request for Alertmanager's API v2. The severity is a label, which is part of an alert's
    identity. A test is an alert that ends by itself."""
    labels, starts_s, ends_s = {"kneewatch": message.status}, message.t_s, message.t_s + TEST_S
    name = "KneewatchTest"
    if message.events:
        event = cast("EventDocument", message.events[0])
        name = "KneewatchCause" + "".join(part.capitalize() for part in event.id.split("_"))
        starts_s = event.since_s
        ends_s = max(event.ended_s or message.t_s, starts_s)
        labels = {
            **{_label_name(label): value for label, value in event.labels.items()},
            "kneewatch": "cause",
            "cause": event.id,
            "kneewatch_target": event.target,
            "model_name": event.model,
            "engine": event.engine,
        }
    alert = {
        "annotations": {
            "summary": escape_plain(message.headline, HEADLINE_MAX),
            "description": text(message),
        },
        "startsAt": rfc3339(starts_s),
        **({"generatorURL": message.parts[0].link} if message.parts[0].link else {}),
    }
    alerts: dict[str, dict[str, Any]] = {}
    for _, severity, is_open in incidents(message):
        given = {"alertname": name, "severity": severity, **labels}
        shown = {label: value for label, value in given.items() if value}
        end = {} if is_open else {"endsAt": rfc3339(ends_s)}
        alerts[severity] = {"labels": shown, **alert, **end}
    yield "/api/v2/alerts", list(alerts.values())


def _label_name(name: str) -> str:
    name = LABEL_CHARACTERS.sub("_", name)
    return f"_{name}" if name[:1].isdigit() else name


def rfc3339(t_s: float) -> str:
    return datetime.fromtimestamp(t_s, tz=UTC).isoformat(timespec="milliseconds")


REQUESTS: Mapping[str, Callable[[Message, str], Requests]] = {
    "pagerduty": pagerduty,
    "opsgenie": opsgenie,
    "alertmanager": alertmanager,
}
"""The requests for a message about one problem, by the receiver's kind."""
