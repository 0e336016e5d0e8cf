"""Webhook payloads of Alertmanager, checked, and their alerts forwarded with a diagnosis. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from kneewatch.agent.notify.dedup import Mark
from kneewatch.agent.notify.message import FIRING, RESOLVED, Line, Message, Part, identity, link
from kneewatch.collector.errors import KneewatchError
from kneewatch.reports.formatting import span

VERSION = "4"
ALERTS_MOST = 1000
SHOWN = 60
EPOCH = datetime.fromtimestamp(0, tz=UTC)
LATEST_S = 253_402_214_400.0
"""The end of the year 9999, less a day."""


class AlertsError(KneewatchError):
    """A body is not what Alertmanager posts; the message names the place in it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `ends_s` is None while it fires."""

    fingerprint: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_s: float
    ends_s: float | None

    @property
    def name(self) -> str:
        """What its rule is called."""
        return self.labels.get("alertname") or "alert"


@dataclass(frozen=True, slots=True)
class Payload:
    """One post. `left_out` is how many alerts Alertmanager itself left out of it."""

    status: str
    alerts: tuple[Alert, ...]
    left_out: int


def payload_of(document: Mapping[str, Any]) -> Payload:
    """The alerts of a posted document. Keys that are not known are passed over.

    Raises:
        AlertsError: it is not one of version 4, or has too many alerts.
    """
    if not isinstance(cast("object", document), Mapping):
        raise AlertsError(f"the body must be a JSON object, not {_shown(document)}")
    version = document.get("version")
    if version != VERSION:
        raise AlertsError(
            f"version must be {VERSION!r}, not {_shown(version)}: this takes what Alertmanager's "
            "webhook_configs post"
        )
    rows: object = document.get("alerts")
    if not isinstance(rows, list):
        raise AlertsError(f"alerts must be a list, not {_shown(rows)}")
    alerts = cast("list[object]", rows)
    if len(alerts) > ALERTS_MOST:
        raise AlertsError(
            f"{len(alerts)} alerts are more than {ALERTS_MOST}: set max_alerts in webhook_configs, "
            "or group by more labels"
        )
    left_out = document.get("truncatedAlerts", 0)
    if not isinstance(left_out, int) or isinstance(left_out, bool) or left_out < 0:
        raise AlertsError(f"truncatedAlerts must be a count, not {_shown(left_out)}")
    made = tuple(_alert(row, f"alerts[{place}]") for place, row in enumerate(alerts))
    status = _status(document.get("status"), "status")
    return Payload(status, made, left_out)


def _alert(row: object, where: str) -> Alert:
    if not isinstance(row, dict):
        raise AlertsError(f"{where} must be an object, not {_shown(row)}")
    alert = cast("dict[str, object]", row)
    status = _status(alert.get("status"), f"{where}.status")
    labels = _texts(alert.get("labels"), f"{where}.labels")
    starts_s = _moment(alert.get("startsAt"), f"{where}.startsAt")
    # While it fires this is the year 1, or a guess at when it will be stale.
    resolved = status == "resolved" and alert.get("endsAt") is not None
    ends_s = _moment(alert["endsAt"], f"{where}.endsAt") if resolved else None
    fingerprint = alert.get("fingerprint")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise AlertsError(f"{where}.fingerprint must be text, not {_shown(fingerprint)}")
    return Alert(
        fingerprint=(fingerprint or identity(*sorted(labels.items())))[:128],
        status=status,
        labels=labels,
        annotations=_texts(alert.get("annotations") or {}, f"{where}.annotations"),
        starts_s=starts_s,
        ends_s=ends_s,
    )


def _status(value: object, where: str) -> str:
    if value not in ("firing", "resolved"):
        raise AlertsError(f"{where} must be firing or resolved, not {_shown(value)}")
    return str(value)


def _texts(value: object, where: str) -> Mapping[str, str]:
    rows = cast("dict[object, object]", value) if isinstance(value, dict) else None
    if rows is None or not all(isinstance(part, str) for row in rows.items() for part in row):
        raise AlertsError(f"{where} must be an object with texts in it")
    return cast("dict[str, str]", rows)


def _moment(value: object, where: str) -> float:
    """Seconds since 1970 of a time as RFC 3339 writes it."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise AlertsError(
            f"{where} must be a time such as 2026-11-21T03:07:00Z, not {_shown(value)}"
        )
    # The year 1 stands for no time; what lies outside can be neither looked up nor shown.
    return min(max((moment - EPOCH).total_seconds(), 0.0), LATEST_S)


def _shown(value: object) -> str:
    told = (
        ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    )
    return told if len(told) <= SHOWN else f"{told[: SHOWN - 3]}..."


# --- Alertmanager's alerts with their diagnosis, as messages --------------------------------------


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


def forwarded(answered: Sequence[Answered], *, receiver: str, base: str, now_s: float) -> Message:
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
