"""A message before it is rendered: a headline and a part for each thing told. Pure.

All text in it is raw: names and summaries come from other machines. `escape` makes it safe for
where it goes.
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
    """A line of a part. `label` is ours; `code` is what would be typed, shown before the text."""

    label: str
    text: str
    code: str = ""

    def plain(self) -> str:
        """The line as one text."""
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.code}. {self.text}".strip() if self.code else f"{label}{self.text}"


@dataclass(frozen=True, slots=True)
class Part:
    """One thing told: a title, lines, and a link to the triage page where there is one."""

    title: str
    lines: tuple[Line, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent. `id` stays the same when it is sent again; `events` are JSON documents."""

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
"""What begins the names under which a fleet is told (agent/fleet/watch.py)."""


def link(base: str, target: str, at_s: float | None = None) -> str:
    """The triage page of a target, now or at a past moment, or a fleet's verdict, which has no
    past; empty where there is no base."""
    if not base:
        return ""
    if target.split("/")[0] == FLEET:
        return f"{base}/api/v1/fleet"
    at = f"&at={date(at_s)}T{clock(at_s)}Z" if at_s is not None else ""
    return f"{base}/triage?target={quote(target, safe='')}{at}"


def identity(*parts: object) -> str:
    """A short id that is the same for the same parts."""
    return sha256("\0".join(map(str, parts)).encode("utf-8", "replace")).hexdigest()[:20]
