"""Alertmanager's webhook: validates payloads, and turns alerts into messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from msgspec import Struct

from kneewatch.agent.notify.events import DedupKey
from kneewatch.agent.notify.message import FIRING, RESOLVED, Line, Message, Part, identity, link
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.rules.formatting import span

VERSION = "4"
ALERTS_MAX = 1000
SHOWN = 60
EPOCH = datetime.fromtimestamp(0, tz=UTC)
LATEST_S = 253_402_214_400.0
"""Latest valid time: a day before the end of the year 9999, in Unix seconds."""


class PayloadError(KneewatchError):
    """The payload does not come from Alertmanager. The message names the wrong key."""


class Alert(Struct, frozen=True):
    """One alert. `ends_s` is None while the alert fires."""

    fingerprint: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_s: float
    ends_s: float | None

    @property
    def name(self) -> str:
        """The name of the alerting rule."""
        return self.labels.get("alertname") or "alert"


class Payload(Struct, frozen=True):
    """One webhook request. `left_out` is the number of alerts that Alertmanager truncated."""

    status: str
    alerts: tuple[Alert, ...]
    left_out: int


def payload_of(document: Mapping[str, Any]) -> Payload:
    """The alerts of a webhook request. Unknown keys are ignored.

    Raises:
        PayloadError: it is not a version 4 payload, or has too many alerts.
    """
    if not isinstance(cast("object", document), Mapping):
        raise PayloadError(f"the body must be a JSON object, not {_shown(document)}")
    version = document.get("version")
    if version != VERSION:
        raise PayloadError(
            f"version must be {VERSION!r}, not {_shown(version)}: this endpoint accepts the "
            "payload of Alertmanager's webhook_configs"
        )
    rows: object = document.get("alerts")
    if not isinstance(rows, list):
        raise PayloadError(f"alerts must be a list, not {_shown(rows)}")
    alerts = cast("list[object]", rows)
    if len(alerts) > ALERTS_MAX:
        raise PayloadError(
            f"{len(alerts)} alerts exceed the limit of {ALERTS_MAX}: set max_alerts in "
            "webhook_configs, or group by more labels"
        )
    left_out = document.get("truncatedAlerts", 0)
    if not isinstance(left_out, int) or isinstance(left_out, bool) or left_out < 0:
        raise PayloadError(f"truncatedAlerts must be a count, not {_shown(left_out)}")
    checked = tuple(_alert(row, f"alerts[{place}]") for place, row in enumerate(alerts))
    status = _status(document.get("status"), "status")
    return Payload(status, checked, left_out)


def _alert(row: object, where: str) -> Alert:
    if not isinstance(row, dict):
        raise PayloadError(f"{where} must be an object, not {_shown(row)}")
    alert = cast("dict[str, object]", row)
    status = _status(alert.get("status"), f"{where}.status")
    labels = _texts(alert.get("labels"), f"{where}.labels")
    starts_s = _unix_s(alert.get("startsAt"), f"{where}.startsAt")
    # While an alert fires, endsAt is the year 1 or a guess at when it becomes stale.
    resolved = status == "resolved" and alert.get("endsAt") is not None
    ends_s = _unix_s(alert["endsAt"], f"{where}.endsAt") if resolved else None
    fingerprint = alert.get("fingerprint")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise PayloadError(f"{where}.fingerprint must be text, not {_shown(fingerprint)}")
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
        raise PayloadError(f"{where} must be firing or resolved, not {_shown(value)}")
    return str(value)


def _texts(value: object, where: str) -> Mapping[str, str]:
    rows = cast("dict[object, object]", value) if isinstance(value, dict) else None
    if rows is None or not all(isinstance(part, str) for row in rows.items() for part in row):
        raise PayloadError(f"{where} must be an object with text values")
    return cast("dict[str, str]", rows)


def _unix_s(value: object, where: str) -> float:
    """Parse an RFC 3339 time. Returns Unix seconds."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise PayloadError(
            f"{where} must be a time such as 2026-11-21T03:07:00Z, not {_shown(value)}"
        )
    # The year 1 means "no time". Clamp to the range that can be looked up and printed.
    return min(max((moment - EPOCH).total_seconds(), 0.0), LATEST_S)


def _shown(value: object) -> str:
    text = (
        ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    )
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# --- Messages -------------------------------------------------------------------------------------


PARTS_MAX = 10
EVENTS_MAX = 20


class DiagnosedAlert(Struct, frozen=True):
    """An alert with its diagnosis: `lines` for people, `document` as in the answer to the webhook.

    `targets` are the matched targets with their labels. `cause_id` is the first cause of these
    targets, or empty.
    """

    alert: Alert
    targets: tuple[tuple[str, Mapping[str, str]], ...]
    lines: tuple[Line, ...]
    document: Any
    cause_id: str = ""

    @property
    def key(self) -> DedupKey:
        """The key for deduplication."""
        return DedupKey(self.alert.fingerprint, self.alert.status, self.alert.starts_s)


def forwarded(
    alerts: Sequence[DiagnosedAlert], *, receiver: str, base: str, now_s: float, docs_url: str = ""
) -> Message:
    """The message for the alerts of one webhook request, firing alerts first.

    `base` is the daemon's address for links to its triage page, `docs_url` the address of the pages
    about causes. Either may be empty: then there are no links to these pages.
    """
    ordered = sorted(alerts, key=lambda alert: alert.alert.status)
    firing = [alert for alert in ordered if alert.alert.status == FIRING]
    first = (firing or ordered)[0]
    names = list(dict.fromkeys(name for alert in ordered for name, _ in alert.targets))
    word = "ALERT" if firing else "ALERT RESOLVED"
    more = f" and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    parts = tuple(_part(alert, base, docs_url, now_s) for alert in ordered[:PARTS_MAX])
    left = len(ordered) - len(parts)
    return Message(
        id=identity(receiver, *sorted(str(alert.key) for alert in ordered)),
        status=FIRING if firing else RESOLVED,
        severity=first.alert.labels.get("severity", "unknown"),
        t_s=now_s,
        headline=f"{word}: {first.alert.name}{more} on {', '.join(names[:5])}",
        parts=parts,
        more=f"and {left} more" if left else "",
        source="alertmanager",
        events=tuple(alert.document for alert in ordered[:EVENTS_MAX]),
    )


def _part(diagnosed: DiagnosedAlert, base: str, docs_url: str, now_s: float) -> Part:
    alert = diagnosed.alert
    lasted = span((alert.ends_s or now_s) - alert.starts_s)
    target = diagnosed.targets[0][0] if diagnosed.targets else ""
    return Part(
        f"{alert.name} {alert.status} {'after' if alert.ends_s else 'for'} {lasted}",
        diagnosed.lines,
        link(base, target, alert.starts_s) if target else "",
        cause_page(docs_url, diagnosed.cause_id),
    )
