"""Where the page's links lead: to itself, relative, so that any prefix of a proxy stays. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from kneewatch.reports.triage.view import SINCE, SINCE_DEFAULT, TriageView

LEAPS: Sequence[tuple[str, float]] = (
    ("\u2212 1 h", -3600.0),
    ("\u2212 15 min", -900.0),
    ("+ 15 min", 900.0),
    ("+ 1 h", 3600.0),
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link; `current` marks what is shown already, an empty `href` what cannot be had."""

    words: str
    href: str
    current: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """The links of one page."""

    view: TriageView

    @property
    def target(self) -> str:
        """The one target of the page; empty on the overview."""
        return self.view.targets[0].name if self.view.one and self.view.targets else ""

    def page(self, *, target: str | None = None, at_s: float | None = None, since: str = "") -> str:
        """The page of a target ("": of all) at a moment (None: now)."""
        name = self.target if target is None else target
        since = since or self.view.since
        asked = {
            **({"target": name} if name else {}),
            **({} if at_s is None else {"at": stamp(at_s)}),
            **({} if since == SINCE_DEFAULT else {"since": since}),
        }
        return f"?{query(asked)}"

    def here(self, *, target: str | None = None, since: str = "") -> str:
        """The same moment of another target, or with another timeline."""
        return self.page(target=target, at_s=self.view.at_s, since=since)

    def moment(self, t_s: float) -> str:
        """The same target at another moment."""
        return self.page(at_s=t_s)

    def leaps(self) -> list[Link]:
        """Steps back and forth in time; there is none into the future."""
        view = self.view
        return [
            Link(words, self.moment(view.moment_s + by_s) if view.moment_s + by_s < view.now_s
                 else "")
            for words, by_s in LEAPS
        ]  # fmt: skip

    def sinces(self) -> list[Link]:
        """How much of the past the timeline may show."""
        return [Link(word, self.here(since=word), word == self.view.since) for word in SINCE]

    def document(self, form: str) -> str:
        """The same as text, JSON or Markdown."""
        name = f"/{quote(self.target, safe='', errors='replace')}" if self.target else ""
        at = {} if self.view.at_s is None else {"at": stamp(self.view.at_s)}
        return f"api/v1/triage{name}?{query({**at, 'format': form})}"


def query(values: Mapping[str, str]) -> str:
    """The query of a link."""
    return urlencode(values, errors="replace")


def stamp(t_s: float) -> str:
    """A moment for a link, 2026-11-21T03:07:12Z: the next whole second, when it has begun."""
    return f"{local_stamp(math.ceil(t_s))}Z"


def local_stamp(t_s: float) -> str:
    """The same as the form has it: without the zone, which is UTC."""
    return f"{datetime.fromtimestamp(t_s, tz=UTC):%Y-%m-%dT%H:%M:%S}"
