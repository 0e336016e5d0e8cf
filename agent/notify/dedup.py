"""Deduplication: which alerts a receiver already has, and grouping of similar events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kneewatch.agent.notify.events import Event, Group, Key, group_of

KEYS_MAX = 10_000


class DedupKey(NamedTuple):
    """Identifies one state of an alert: fingerprint, status and start."""

    fingerprint: str
    status: str
    starts_s: float


class SentAlerts:
    """The newest key of each alert that was delivered or is on its way. Not thread-safe."""

    def __init__(self) -> None:
        self._delivered: dict[str, DedupKey] = {}
        self._pending: dict[str, DedupKey] = {}
        self.is_changed = False

    def take(self, key: DedupKey) -> bool:
        """Whether an alert is new; if so it counts as pending from now on."""
        earlier = self._pending.get(key.fingerprint) or self._delivered.get(key.fingerprint)
        if earlier == key:
            return False
        self._pending[key.fingerprint] = key
        return True

    def done(self, key: DedupKey, *, delivered: bool) -> None:
        """Settle a pending alert. One that was given up is sent again when Alertmanager repeats
        it."""
        if self._pending.get(key.fingerprint) == key:
            del self._pending[key.fingerprint]
        if delivered:
            self._delivered.pop(key.fingerprint, None)
            self._delivered[key.fingerprint] = key
            while len(self._delivered) > KEYS_MAX:
                del self._delivered[next(iter(self._delivered))]
            self.is_changed = True

    def rows(self) -> list[DedupKey]:
        """The state to keep over a restart, ready for JSON."""
        self.is_changed = False
        return list(self._delivered.values())

    def restore(self, rows: Iterable[Any]) -> None:
        """Load what `rows` returned before a restart.

        Raises:
            TypeError, ValueError: the rows are malformed.
        """
        for fingerprint, status, starts_s in rows:
            key = DedupKey(str(fingerprint), str(status), float(starts_s))
            self._delivered[key.fingerprint] = key


# --- Grouping -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Gathering:
    due_s: float
    events: dict[Key, Event] = field(default_factory=dict[Key, Event])


class Groups:
    """Groups of similar events that wait to become one message each.

    A group is due `wait_s` after its first event.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._pending: dict[Group, _Gathering] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def gather(self, events: Iterable[Event], now_s: float) -> None:
        """Add events. A problem that gets worse before its first message is sent begins worse."""
        for event in events:
            fresh = event
            begun = self._pending.get(("began", event.key.id, ""))
            if event.kind == "worse" and begun is not None and event.key in begun.events:
                fresh = replace(event, kind="began", before=None)
            group = group_of(fresh)
            gathering = self._pending.setdefault(group, _Gathering(now_s + self._wait_s))
            gathering.events[fresh.key] = fresh

    def due_s(self) -> float | None:
        """When the first group is due; None where there is none."""
        return min((gathering.due_s for gathering in self._pending.values()), default=None)

    def take(self, now_s: float) -> list[Event]:
        """The events of a group that is due, which is removed; empty where none is."""
        due = next(
            (group for group, gathering in self._pending.items() if gathering.due_s <= now_s), None
        )
        return list(self._pending.pop(due).events.values()) if due is not None else []
