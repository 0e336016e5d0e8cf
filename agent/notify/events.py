"""What kneewatch found itself, as messages: one for all that is alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from kneewatch.agent.notify.troubles import CASCADE, Event
from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports import advice
from kneewatch.reports.document import cause_document, recommendation_document, stage_document
from kneewatch.reports.text import now_words, stage_words, summary_words, told_evidence
from kneewatch.reports.words import moment, span
from kneewatch.rules.cascade import NAMES

Group = tuple[str, str, str]
NAMED_MOST = 5
PARTS_MOST = 10
EVENTS_MOST = 100


def group_of(event: Event) -> Group:
    """What events that may share a message have in common."""
    return event.what, event.key.id, event.how


def message(events: Sequence[Event], *, receiver: str, base: str) -> Message:
    """The message for events of one group, the worst of them in full. `base`: see `link`."""
    ordered = sorted(
        events,
        key=lambda event: (-event.severity, -event.stage, event.key),
    )
    worst = ordered[0]
    parts = [_part(worst, base, full=True)]
    parts += [_part(event, base, full=False) for event in ordered[1:PARTS_MOST]]
    left = len(ordered) - len(parts)
    marks = sorted(f"{event.key} {event.since_s:.3f} {event.stage}" for event in events)
    return Message(
        id=identity(receiver, *group_of(worst), *marks),
        status=FIRING if worst.what != "ended" else UNWATCHED if worst.how else RESOLVED,
        severity=worst.severity.word,
        t_s=max(event.t_s for event in events),
        headline=_headline(ordered),
        parts=tuple(parts),
        more=f"and {left} more" if left else "",
        events=tuple(_document(event, base) for event in ordered[:EVENTS_MOST]),
    )


def _headline(events: Sequence[Event]) -> str:
    worst = events[0]
    where = _where(events)
    told = f"{worst.key.id} on {where}"
    if worst.key.id == CASCADE and worst.stage and worst.what != "ended":
        told += f", stage {worst.stage} ({NAMES[worst.stage]})"
    lasted = span((worst.ended_s or worst.t_s) - worst.since_s)
    if worst.what == "ended":
        word = worst.how.upper() if worst.how else "RESOLVED"
        times = f"{moment(worst.since_s, worst.t_s)} to {moment(worst.ended_s or 0, worst.t_s)}"
        return f"{word}: {told}, after {lasted} ({times})"
    word = worst.severity.word.upper()
    if worst.what == "still":
        return f"STILL {word} after {lasted}: {told}"
    if worst.what == "worse":
        was = (
            f", was {worst.before.word.upper()}"
            if worst.before not in (None, worst.severity)
            else ""
        )
        return f"WORSE, {word}{was}: {told}, for {lasted}"
    return f"{word}: {told}" + (f", for {lasted}" if worst.t_s - worst.since_s >= 1 else "")


def _where(events: Sequence[Event]) -> str:
    if len(events) == 1:
        return _who(events[0])
    names = list(dict.fromkeys(event.key.target for event in events))
    if len(names) == 1:
        return f"{names[0]} ({len(events)} engines)"
    shown = ", ".join(names[:NAMED_MOST])
    left = len(names) - NAMED_MOST
    return f"{len(names)} targets: {shown}" + (f" and {left} more" if left > 0 else "")


def _who(event: Event) -> str:
    key = event.key
    if not key.model and not key.engine:
        return key.target
    return f"{key.target} (model {key.model or '?'}, engine {key.engine or '?'})"


def _part(event: Event, base: str, *, full: bool) -> Part:
    if event.what == "ended" or event.diagnosis is None:
        left = (Line("still wrong there", ", ".join(event.left)),) if event.left else ()
        # It is over: the page of the moment it began has something to show.
        return Part(_who(event), left, link(base, event.key.target, event.since_s))
    lines = _lines(event, event.diagnosis, event.cause)
    return Part(_who(event), tuple(lines if full else lines[:1]), link(base, event.key.target))


def _lines(event: Event, diagnosis: Diagnosis, cause: Cause | None) -> list[Line]:
    lines = [Line("", summary_words(cause, diagnosis.t_s))] if cause else []
    if event.stage:
        lines.append(Line("", stage_words(diagnosis)))
    if now := now_words(diagnosis):
        lines.append(Line("now", now))
    if cause is None:
        return lines
    lines += [Line("evidence", text) for text in told_evidence(cause)[0]]
    made = advice.advised(diagnosis, cause)
    if not made:
        return [*lines, Line("do first", cause.lever)]
    lines.append(Line("do first", made[0].summary, advice.changes_words(made[0])))
    if numbers := advice.numbers_words(made[0]):
        lines.append(Line("expected", numbers))
    return lines


def _document(event: Event, base: str) -> dict[str, Any]:
    diagnosis, cause = event.diagnosis, event.cause
    made = advice.advised(diagnosis, cause) if diagnosis and cause else []
    return {
        "what": event.what,
        "target": event.key.target,
        "model": event.key.model,
        "engine": event.key.engine,
        "id": event.key.id,
        "severity": event.severity.word,
        "since": round(event.since_s, 3),
        "ended": None if event.ended_s is None else round(event.ended_s, 3),
        "how": event.how,
        "left": list(event.left),
        "stage": stage_document(diagnosis.stage) if diagnosis else None,
        "cause": cause_document(cause) if cause else None,
        "recommendation": recommendation_document(made[0]) if made else None,
        "link": link(base, event.key.target, event.since_s if event.what == "ended" else None),
    }
