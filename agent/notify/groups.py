"""Events that are alike, gathered for a while to become one message. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kneewatch.agent.notify.events import Group, group_of
from kneewatch.agent.notify.troubles import Event, Key


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
