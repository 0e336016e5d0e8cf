"""Turns the problems of a target into events, and similar events, or alerts of Alertmanager, into
one message. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from kneewatch.agent.notify.message import (
    FIRING,
    RESOLVED,
    UNWATCHED,
    Line,
    Message,
    Part,
    identity,
    link,
)
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.cause import Cause, told
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.recommend.advice import Advice, in_document
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import DocumentError, converted
from kneewatch.reports import advice_text as advice
from kneewatch.reports.diagnosis_text import (
    evidence_lines,
    figures,
    stage_words,
    summary_words,
)
from kneewatch.reports.lines import moment
from kneewatch.rules.cascade import NAMES, Stage
from kneewatch.rules.formatting import listed, span
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import UnixTime, to_ms

EventKind = Literal["began", "worse", "still", "ended"]
KV_PRESSURE = "kv_pressure"
METRICS_MISSING = "metrics_missing"
"""Id of the cause that core signals are missing. While it is present, the absence of other causes
proves nothing."""


class Key(NamedTuple):
    """Identifies a problem, also across a restart. `model` and `engine` are empty if the problem
    concerns the whole target."""

    target: str
    model: str
    engine: str
    id: str


class Event(Struct, frozen=True):
    """A cause or KV cascade stage of one engine as of its newest scrape, and what changed: it
    began, got worse, is still there or ended.

    `stage` is the stage's number, 0 outside the cascade. `cause` is None for a stage without a
    cause. `diagnosis` and `cause` are None if the problem ended. `before` is the previous severity
    if the problem got worse. `ended_s` is the time since when the problem is absent. `how` is the
    way in which it ended; empty if it cleared by itself. `serial` distinguishes problems with equal
    keys. `left` are the ids of problems that are still active on the same engine or target.
    `shown_s` is the moment that the message is about: of a problem that ended, that of the message
    before. `advised_before` is the change that the message before advised, if `advised` is another.
    `labels` are those of the target.
    """

    kind: EventKind
    key: Key
    severity: Severity
    stage: int
    since_s: float
    t_s: float
    diagnosis: Verdict | None = None
    cause: Cause | None = None
    before: Severity | None = None
    ended_s: float | None = None
    how: str = ""
    left: tuple[str, ...] = ()
    serial: int = 0
    shown_s: float = 0.0
    advised: str = ""
    advised_before: str = ""
    labels: Mapping[str, str] = {}

    @property
    def badness(self) -> tuple[Severity, int, float]:
        """A sort key: severity, stage, confidence."""
        return self.severity, self.stage, self.cause.confidence if self.cause else 0.0

    @property
    def is_ending(self) -> bool:
        """Whether the newest scrape no longer shows what gives the problem its severity."""
        diagnosis, cause = self.diagnosis, self.cause
        if diagnosis is None or cause is None or not advice.is_ending(cause, diagnosis.t_s):
            return False
        return not self.stage or diagnosis.stage.severity != self.severity


def problems(state: TargetState, floor: Severity) -> dict[Key, Event]:
    """The problems in a target's state by key, each as the event that it began. Those less severe
    than `floor` are left out."""
    worst: dict[Key, Event] = {}
    is_whole_target = not any(diagnosis.was_read for diagnosis in state.diagnoses)
    for diagnosis in state.diagnoses:
        for problem in _of_engine(state.name, diagnosis, is_whole_target=is_whole_target):
            other = worst.get(problem.key)
            if problem.severity >= floor and (other is None or other.badness < problem.badness):
                worst[problem.key] = replace(problem, labels=state.labels)
    return worst


def _of_engine(target: str, diagnosis: Verdict, *, is_whole_target: bool) -> list[Event]:
    engine = ("", "") if is_whole_target else (diagnosis.model, diagnosis.engine)
    engine_problems: list[Event] = []
    stage, pressure = diagnosis.stage, None

    def add(name: str, severity: Severity, number: int, since_s: float, of: Cause | None) -> None:
        key = Key(target, *engine, name)
        t_s, best = diagnosis.t_s, advice.advised(diagnosis, of)[:1] if of else []
        flags = "".join(map(advice.flags_words, best))
        began = Event("began", key, severity, number, since_s, t_s, diagnosis, of, shown_s=t_s)
        engine_problems.append(replace(began, advised=flags))

    for cause in diagnosis.causes:
        if cause.id == KV_PRESSURE:
            pressure = cause
            continue
        since_s = diagnosis.t_s if cause.since_s is None else cause.since_s
        add(cause.id, cause.severity, 0, since_s, cause)
    if pressure is not None or stage.number:
        severity = max(
            stage.severity or Severity.OK, pressure.severity if pressure else Severity.OK
        )
        starts_s = [stage.since_s, pressure.since_s if pressure else None]
        since_s = min(diagnosis.t_s if start_s is None else start_s for start_s in starts_s)
        add(KV_PRESSURE, severity, stage.level, since_s, pressure)
    return engine_problems


def is_resolved(key: Key, diagnoses: Sequence[Verdict]) -> bool:
    """Whether a problem that is no longer diagnosed is resolved. `diagnoses` are the newest ones of
    its target.

    The problem is resolved if its engine was read and no cause on the engine explains the problem.
    """
    judged = [diagnosis for diagnosis in diagnoses if _is_judged(diagnosis)]
    if not (key.model or key.engine):
        return bool(judged)
    own = [d for d in diagnoses if (d.model, d.engine) == (key.model, key.engine)]
    if not own:  # the engine has left a page that can be read
        return bool(judged)
    return all(
        _is_judged(diagnosis) and not any(key.id in cause.explains for cause in diagnosis.causes)
        for diagnosis in own
    )


def _is_judged(diagnosis: Verdict) -> bool:
    is_incomplete = any(cause.id == METRICS_MISSING for cause in diagnosis.causes)
    return (
        diagnosis.stage.number is not None and diagnosis.health != "unknown" and not is_incomplete
    )


# --- Messages -------------------------------------------------------------------------------------


Group = tuple[str, str, str]
NAMED_MAX = 5
PARTS_MAX = 10
EVENTS_MAX = 100


def group_of(event: Event) -> Group:
    """The group of an event. Events of the same group share a message."""
    return event.kind, event.key.id, event.how


def message(events: Sequence[Event], *, receiver: str, base: str, docs_url: str = "") -> Message:
    """The message for the events of one group. It shows the worst event in full. `base` is the
    address for links to the triage page, as in `link`."""
    ordered = sorted(events, key=lambda event: (-event.severity, -event.stage, event.key))
    worst = ordered[0]
    parts = [_part(worst, base, docs_url, full=True)]
    parts += [_part(event, base, docs_url, full=False) for event in ordered[1:PARTS_MAX]]
    left = len(ordered) - len(parts)
    marks = sorted(f"{event.key} {event.since_s:.3f} {event.stage}" for event in events)
    return Message(
        id=identity(receiver, *group_of(worst), *marks),
        status=FIRING if worst.kind != "ended" else UNWATCHED if worst.how else RESOLVED,
        severity=worst.severity.word,
        t_s=max(event.t_s for event in events),
        headline=_headline(ordered),
        parts=tuple(parts),
        more=f"and {left} more" if left else "",
        events=tuple(_document(event, base, docs_url) for event in ordered[:EVENTS_MAX]),
    )


def _headline(events: Sequence[Event]) -> str:
    worst = events[0]
    where = _where(events)
    subject = f"{worst.key.id} on {where}"
    if worst.key.id == KV_PRESSURE and worst.stage and worst.kind != "ended":
        subject += f", stage {worst.stage} ({NAMES[worst.stage]})"
    lasted = span((worst.ended_s or worst.t_s) - worst.since_s)
    if worst.kind == "ended":
        word = worst.how.upper() if worst.how else "RESOLVED"
        times = f"{moment(worst.since_s, worst.t_s)} to {moment(worst.ended_s or 0, worst.t_s)}"
        return f"{word}: {subject}, after {lasted} ({times})"
    word = worst.severity.word.upper()
    if worst.kind == "still":
        return f"STILL {word} after {lasted}: {subject}"
    if worst.kind == "worse":
        was = (
            f", was {worst.before.word.upper()}"
            if worst.before not in (None, worst.severity)
            else ""
        )
        return f"WORSE, {word}{was}: {subject}, for {lasted}"
    return f"{word}: {subject}" + (f", for {lasted}" if worst.t_s - worst.since_s >= 1 else "")


def _where(events: Sequence[Event]) -> str:
    if len(events) == 1:
        return _who(events[0])
    names = list(dict.fromkeys(event.key.target for event in events))
    if len(names) == 1:
        return f"{names[0]} ({len(events)} engines)"
    return f"{len(names)} targets: {listed(names, NAMED_MAX)}"


def _who(event: Event) -> str:
    key = event.key
    if not key.model and not key.engine:
        return key.target
    return f"{key.target} (model {key.model or '?'}, engine {key.engine or '?'})"


def _part(event: Event, base: str, docs_url: str, *, full: bool) -> Part:
    url = link(base, event.key.target, event.shown_s)
    words = f"The message before advised {event.advised_before}."
    changed = [Line("advice changed", words, event.advised)] if event.advised_before else []
    if event.kind == "ended" or event.diagnosis is None:
        left = [Line("still active", ", ".join(event.left))] if event.left else []
        return Part(_who(event), (*left, *changed), url)
    lines = _lines(event, event.diagnosis, event.cause)
    shown = [*lines, *changed] if full else lines[:1]
    return Part(_who(event), tuple(shown), url, cause_page(docs_url, event.key.id))


def _lines(event: Event, diagnosis: Verdict, cause: Cause | None) -> list[Line]:
    lines = list[Line]()
    if cause is not None:
        lines = [Line("", summary_words(cause, diagnosis.t_s)), *action_lines(diagnosis, cause)]
        # An effect at the load of another moment would contradict the figures of this one.
        bests = [b for b in advice.advised(diagnosis, cause)[:1] if b.as_of_s in (None, event.t_s)]
        lines += [Line(advice.EXPECTED, n) for best in bests if (n := advice.numbers_words(best))]
    if event.stage:  # the figures are its evidence
        lines.append(Line("", stage_words(diagnosis)))
    elif cause is not None:
        lines += [Line("evidence", text) for text in evidence_lines(cause)[0]]
    return [*lines, *(Line(when, numbers) for when, numbers in figures(diagnosis))]


def action_lines(diagnosis: Verdict, cause: Cause) -> list[Line]:
    """What to do: the stop-gap, then the fix, whose code is what is pasted and nothing else."""
    *stop_gaps, (label, words, _) = advice.first_steps(diagnosis, cause)
    fix = Line(label, words)
    for best in advice.advised(diagnosis, cause)[:1]:
        fix = Line(label, advice.brief_words(best, diagnosis.t_s), advice.command(best.changes))
    return [*(Line(*step) for step in stop_gaps), fix]


class EventDocument(Struct, frozen=True):
    """An event as webhooks send it.

    - `what`: began, worse, still or ended.
    - `target`: the target's name.
    - `model`, `engine`: the engine's name; empty if the problem concerns the whole target.
    - `id`: the id of the problem.
    - `severity`: its severity.
    - `since_s`: when it began.
    - `ended_s`: since when it is absent; null while it is present.
    - `how`: the way in which it ended; empty if it cleared by itself.
    - `left`: ids of problems that are still active on the same engine or target.
    - `stage`: the engine's stage; null if the problem ended.
    - `cause`: the cause; null if the problem ended, or is a stage without a cause.
    - `recommendation`: the best change for the cause; null if there is none.
    - `link`: the address of the target's page at the moment that the message is about; empty if
      kneewatch's own address is not set.
    - `labels`: the labels of the target.
    """

    what: EventKind
    target: str
    model: str
    engine: str
    id: str
    severity: Severity
    since_s: UnixTime = field(name="since")
    ended_s: UnixTime | None = field(name="ended")
    how: str
    left: tuple[str, ...]
    stage: Stage | None
    cause: Cause | None
    recommendation: Advice | None
    link: str
    labels: Mapping[str, str]


def _document(event: Event, base: str, docs_url: str) -> EventDocument:
    diagnosis, cause = event.diagnosis, event.cause
    recommendations = advice.advised(diagnosis, cause) if diagnosis and cause else []
    return EventDocument(
        event.kind,
        *event.key,
        event.severity,
        to_ms(event.since_s),
        None if event.ended_s is None else to_ms(event.ended_s),
        event.how,
        event.left,
        diagnosis.stage if diagnosis else None,
        replace(told(cause), docs=cause_page(docs_url, cause.id)) if cause else None,
        in_document(recommendations[0]) if recommendations else None,
        link(base, event.key.target, event.shown_s),
        event.labels,
    )


# --- Which alerts a receiver already has, and grouping of similar events --------------------------


KEYS_MAX = 10_000


class DedupKey(NamedTuple):
    """Identifies one state of an alert: fingerprint, status and start."""

    fingerprint: str
    status: str
    starts_s: float


class SentAlerts:
    """For each alert, the newest key that was delivered or is being delivered. Not thread-safe."""

    def __init__(self) -> None:
        self._delivered: dict[str, DedupKey] = {}
        self._pending: dict[str, DedupKey] = {}
        self.is_changed = False

    def take(self, key: DedupKey) -> bool:
        """Whether an alert is new. A new alert counts as pending after this call."""
        earlier = self._pending.get(key.fingerprint) or self._delivered.get(key.fingerprint)
        if earlier == key:
            return False
        self._pending[key.fingerprint] = key
        return True

    def done(self, key: DedupKey, *, delivered: bool) -> None:
        """Settle a pending alert. If it was given up, it is sent again when Alertmanager repeats
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
        """The state as JSON values, to be restored after a restart."""
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


class Groups:
    """Groups of similar events. Each group becomes one message.

    A group is due `wait_s` seconds after its first event. That a target is no longer watched is
    held back for `hold_s`: a discovery that loses targets for a moment is no news.
    """

    def __init__(self, *, wait_s: float, hold_s: float) -> None:
        self._wait_s, self._hold_s = wait_s, max(wait_s, hold_s)
        self._pending: dict[Group, dict[Key, tuple[float, Event]]] = {}
        """The events of each group, each with the time at which it is due."""

    def __len__(self) -> int:
        return len(self._pending)

    def gather(self, events: Iterable[Event], now_s: float) -> None:
        """Add events. If a problem gets worse before the first message about it, the message still
        says that it began."""
        for event in events:
            grouped = event
            if event.kind == "worse" and event.key in self._pending.get(
                ("began", event.key.id, ""), ()
            ):
                grouped = replace(event, kind="began", before=None)
            group = self._pending.setdefault(group_of(grouped), {})
            due_s = now_s + (self._hold_s if grouped.how else self._wait_s)
            if group and not grouped.how:
                due_s = _due_s(group)
            group[grouped.key] = due_s, grouped

    def due_s(self) -> float | None:
        """Time at which the first group is due; None if there is none."""
        return min(map(_due_s, self._pending.values()), default=None)

    def take(self, now_s: float) -> list[Event]:
        """Remove a group that is due and return its events. Empty if no group is due."""
        due = next((name for name, group in self._pending.items() if _due_s(group) <= now_s), None)
        if due is None:
            return []
        group = self._pending.pop(due)
        left = {key: held for key, held in group.items() if held[0] > now_s + self._wait_s}
        if left:
            self._pending[due] = left
        return [event for key, (_, event) in group.items() if key not in left]


def _due_s(group: Mapping[Key, tuple[float, Event]]) -> float:
    return min(due_s for due_s, _ in group.values())


# --- Alertmanager's webhook: validates payloads, and turns alerts into messages -------------------


ALERTS_MAX = 1000
EPOCH = datetime.fromtimestamp(0, tz=UTC)
LATEST_S = 253_402_214_400.0
"""Latest valid time: a day before the end of the year 9999, in Unix seconds."""

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
    payload = converted(document, Payload, schema="Alertmanager webhook (version 4)")
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


# --- Messages about alerts ------------------------------------------------------------------------


DOCUMENTS_MAX = 20


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
    parts = tuple(_alert_part(alert, base, docs_url, now_s) for alert in ordered[:PARTS_MAX])
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
        events=tuple(alert.document for alert in ordered[:DOCUMENTS_MAX]),
    )


def _alert_part(diagnosed: DiagnosedAlert, base: str, docs_url: str, now_s: float) -> Part:
    alert = diagnosed.alert
    lasted = span((alert.ends_s or now_s) - alert.starts_s)
    target = diagnosed.targets[0][0] if diagnosed.targets else ""
    return Part(
        f"{alert.name} {alert.status} {'after' if alert.ends_s else 'for'} {lasted}",
        diagnosed.lines,
        link(base, target, alert.starts_s) if target else "",
        cause_page(docs_url, diagnosed.cause_id),
    )
