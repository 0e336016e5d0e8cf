"""Alertmanager's alerts with their diagnosis, as messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kneewatch.agent.notify.heard import Mark
from kneewatch.agent.notify.message import FIRING, RESOLVED, Line, Message, Part, identity, link
from kneewatch.agent.notify.payload import Alert
from kneewatch.reports.words import span

PARTS_MOST = 10
EVENTS_MOST = 20


@dataclass(frozen=True, slots=True)
class Answered:
    """An alert with what is known of it. `told` are lines for a person, `document` what was
    answered; `targets` are the matched ones with their labels."""

    alert: Alert
    targets: tuple[tuple[str, Mapping[str, str]], ...]
    told: tuple[Line, ...]
    document: Mapping[str, Any]

    @property
    def mark(self) -> Mark:
        """What the alert is known by."""
        return Mark(self.alert.fingerprint, self.alert.status, self.alert.starts_s)


def passed_on(answered: Sequence[Answered], *, receiver: str, base: str, now_s: float) -> Message:
    """The message for alerts that came together, those that fire first."""
    ordered = sorted(answered, key=lambda one: one.alert.status)
    firing = [one for one in ordered if one.alert.status == FIRING]
    first = (firing or ordered)[0]
    names = list(dict.fromkeys(name for one in ordered for name, _ in one.targets))
    word = "ALERT" if firing else "ALERT RESOLVED"
    more = f" and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    parts = tuple(_part(one, base, now_s) for one in ordered[:PARTS_MOST])
    left = len(ordered) - len(parts)
    return Message(
        id=identity(receiver, *sorted(str(one.mark) for one in ordered)),
        status=FIRING if firing else RESOLVED,
        severity=first.alert.labels.get("severity", "unknown"),
        t_s=now_s,
        headline=f"{word}: {first.alert.name}{more} on {', '.join(names[:5])}",
        parts=parts,
        more=f"and {left} more" if left else "",
        source="alertmanager",
        events=tuple(one.document for one in ordered[:EVENTS_MOST]),
    )


def _part(one: Answered, base: str, now_s: float) -> Part:
    alert = one.alert
    lasted = span((alert.ends_s or now_s) - alert.starts_s)
    target = one.targets[0][0] if one.targets else ""
    return Part(
        f"{alert.name} {alert.status}, after {lasted}",
        one.told,
        link(base, target, alert.starts_s) if target else "",
    )
