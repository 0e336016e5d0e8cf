"""Deduplication: which alerts a receiver already has, and grouping of similar events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kneewatch.agent.notify.events import Event, Group, Key, group_of

MARKS_MOST = 10_000


class Mark(NamedTuple):
    """What an alert is known by."""

    fingerprint: str
    status: str
    starts_s: float


class SentAlerts:
    """The newest mark of each alert. Not safe between threads."""

    def __init__(self) -> None:
        self._told: dict[str, Mark] = {}
        self._going: dict[str, Mark] = {}
        self.is_changed = False

    def take(self, mark: Mark) -> bool:
        """Whether an alert is to be told; if so it is on its way from now on."""
        known = self._going.get(mark.fingerprint) or self._told.get(mark.fingerprint)
        if known == mark:
            return False
        self._going[mark.fingerprint] = mark
        return True

    def done(self, mark: Mark, *, delivered: bool) -> None:
        """An alert was delivered, or given up: then Alertmanager's next word of it is told."""
        if self._going.get(mark.fingerprint) == mark:
            del self._going[mark.fingerprint]
        if delivered:
            self._told.pop(mark.fingerprint, None)
            self._told[mark.fingerprint] = mark
            while len(self._told) > MARKS_MOST:
                del self._told[next(iter(self._told))]
            self.is_changed = True

    def rows(self) -> list[Mark]:
        """What must be known after a restart, ready for JSON."""
        self.is_changed = False
        return list(self._told.values())

    def restore(self, rows: Iterable[Any]) -> None:
        """Take what `rows` gave before a restart.

        Raises:
            TypeError, ValueError: they are not what it gave.
        """
        for fingerprint, status, starts_s in rows:
            mark = Mark(str(fingerprint), str(status), float(starts_s))
            self._told[mark.fingerprint] = mark


# --- Events that are alike, gathered for a while to become one message ----------------------------


@dataclass(slots=True)
class _Gathering:
    due_s: float
    events: dict[Key, Event] = field(default_factory=dict[Key, Event])


class Groups:
    """What is being gathered; the wait begins with the first event of a group."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._going: dict[Group, _Gathering] = {}

    def __len__(self) -> int:
        return len(self._going)

    def gather(self, found: Iterable[Event], now_s: float) -> None:
        """Take events. What gets worse before its beginning was told just begins worse."""
        for event in found:
            fresh = event
            begun = self._going.get(("began", event.key.id, ""))
            if event.what == "worse" and begun is not None and event.key in begun.events:
                fresh = replace(event, what="began", before=None)
            group = group_of(fresh)
            gathering = self._going.setdefault(group, _Gathering(now_s + self._wait_s))
            gathering.events[fresh.key] = fresh

    def due_s(self) -> float | None:
        """When the first of them is due; None while there is none."""
        return min((one.due_s for one in self._going.values()), default=None)

    def take(self, now_s: float) -> list[Event]:
        """The first group that is due; empty where none is."""
        due = next((group for group, one in self._going.items() if one.due_s <= now_s), None)
        return list(self._going.pop(due).events.values()) if due is not None else []
