"""A notification before it is formatted: a headline and one part per engine or alert. Pure.

All text is raw: names and summaries come from other machines. `formatting` escapes it for each
receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from kneewatch.reports.formatting import clock, date

SCHEMA = "kneewatch.notification/1"
FIRING, RESOLVED, UNWATCHED = "firing", "resolved", "unwatched"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a part. `label` needs no escape; `code` is a flag or command, shown first."""

    label: str
    text: str
    code: str = ""

    def plain(self) -> str:
        """The line as one string."""
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.code}. {self.text}".strip() if self.code else f"{label}{self.text}"


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a message: a title, lines, and links to the triage page and to the cause's page;
    "" for a page that has no known address."""

    title: str
    lines: tuple[Line, ...] = ()
    link: str = ""
    docs: str = ""

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The links that there are, each with its words."""
        named = (("triage", self.link), ("runbook", self.docs))
        return tuple((words, url) for words, url in named if url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A notification. `id` is stable over retries; `events` are JSON documents."""

    id: str
    status: str
    severity: str
    t_s: float
    headline: str
    parts: tuple[Part, ...]
    more: str = ""
    source: str = "kneewatch"
    events: tuple[Mapping[str, Any], ...] = field(default=())


FLEET = "fleet"
"""The first part of the target names of a fleet (agent/fleet/watch.py)."""


def link(base: str, target: str, at_s: float | None = None) -> str:
    """The URL of a target's triage page, now or at `at_s`, or of a fleet's verdict, which has no
    history; "" without a base URL."""
    if not base:
        return ""
    if target.split("/")[0] == FLEET:
        return f"{base}/api/v1/fleet"
    at = f"&at={date(at_s)}T{clock(at_s)}Z" if at_s is not None else ""
    return f"{base}/triage?target={quote(target, safe='')}{at}"


def identity(*parts: object) -> str:
    """A short hash of the parts, as hexadecimal text."""
    return sha256("\0".join(map(str, parts)).encode("utf-8", "replace")).hexdigest()[:20]
