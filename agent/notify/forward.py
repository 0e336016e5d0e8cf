"""Alertmanager's webhook: validates payloads, and turns alerts into messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from kneewatch.agent.notify.events import PARTS_MAX, DedupKey
from kneewatch.agent.notify.message import FIRING, RESOLVED, Line, Message, Part, identity, link
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.verdict_json import DocumentError, converted
from kneewatch.rules.formatting import span

ALERTS_MAX = 1000
EPOCH = datetime.fromtimestamp(0, tz=UTC)
LATEST_S = 253_402_214_400.0
"""Latest valid time: a day before the end of the year 9999, in Unix seconds."""

STATUSES = (FIRING, RESOLVED)
Status = Literal["firing", "resolved"]
Texts = Mapping[str, str]
Time = Annotated[datetime, Meta(tz=True)]


class Alert(Struct, frozen=True, rename="camel"):
    """One alert."""

    status: Status
    labels: Texts
    starts_at: Time
    annotations: Texts | None = None
    ends_at: Time | None = None
    given_fingerprint: str | None = field(default=None, name="fingerprint")

    @property
    def name(self) -> str:
        return self.labels.get("alertname") or "alert"

    @property
    def fingerprint(self) -> str:
        """Alertmanager's fingerprint, or a hash of the labels."""
        return (self.given_fingerprint or identity(*sorted(self.labels.items())))[:128]

    @property
    def starts_s(self) -> float:
        """When it started, in Unix seconds."""
        return _unix_s(self.starts_at)

    @property
    def ends_s(self) -> float | None:
        """When it was resolved, in Unix seconds. None while it fires: `endsAt` is then the year 1,
        or a guess at when it becomes stale."""
        resolved = self.status == RESOLVED and self.ends_at is not None
        return _unix_s(self.ends_at) if resolved and self.ends_at else None


class Payload(Struct, frozen=True, rename="camel"):
    """One webhook request of Alertmanager, version 4. Unknown keys are ignored.

    - `truncated_alerts`: the number of alerts that Alertmanager left out.
    """

    version: Literal["4"]
    status: Status
    alerts: tuple[Alert, ...]
    truncated_alerts: Annotated[int, Meta(ge=0)] = 0


def payload_of(document: object) -> Payload:
    """The alerts of a webhook request.

    Raises:
        DocumentError: it is not a version 4 payload, or has too many alerts.
    """
    words = {"status": STATUSES, "version": ("4",)}
    payload = converted(document, Payload, schema="Alertmanager webhook (version 4)", words=words)
    if len(payload.alerts) > ALERTS_MAX:
        raise DocumentError(
            f"{len(payload.alerts)} alerts exceed the limit of {ALERTS_MAX}: set max_alerts in "
            "webhook_configs, or group by more labels"
        )
    return payload


def _unix_s(moment: datetime) -> float:
    """A time in Unix seconds, within the range that can be looked up and printed: the year 1 means
    "no time"."""
    return min(max((moment - EPOCH).total_seconds(), 0.0), LATEST_S)


# --- Messages -------------------------------------------------------------------------------------


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
