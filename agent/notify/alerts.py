"""The answer to Alertmanager's webhook: for each alert, what the matched servers looked like when
it began and look like now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kneewatch.agent.notify.alert_context import (
    AlertContext,
    Candidate,
    EngineName,
    Match,
    Past,
    match,
)
from kneewatch.agent.notify.forward import Alert, Answered, payload_of
from kneewatch.agent.notify.message import Line
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import TargetSpec
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_json import document
from kneewatch.reports.formatting import cut, moment

if TYPE_CHECKING:
    from kneewatch.agent.notify.notifier import Notifier
    from kneewatch.agent.store.reader import Reader

SCHEMA = "kneewatch.alerts/1"
DOCUMENTS_MOST = 32
"""Engines whose documents are in one answer: a document is some 20 kB, twice for each."""


LOOKS_TOLD = 3
LINE_MOST = 300


class Known(Protocol):
    """What an answer is made from: as much of the API's Service as is needed here."""

    @property
    def board(self) -> Board: ...
    @property
    def reader(self) -> Reader | None: ...
    @property
    def targets(self) -> Callable[[], Sequence[TargetSpec]]: ...
    @property
    def notifier(self) -> Notifier | None: ...
    @property
    def clock(self) -> Callable[[], float]: ...


def answer(payload: Mapping[str, Any], service: Known) -> dict[str, Any]:
    """The document kneewatch.alerts/1 for what Alertmanager posted; receivers that are set are sent
    what they have not heard of.

    Raises:
        AlertsError: it is not what Alertmanager posts.
    """
    posted = payload_of(payload)
    now_s = service.clock()
    answering = _Answering(service, now_s)
    # Those that fire first: what is left out of a long answer is what is over.
    answered = [answering.of(a) for a in sorted(posted.alerts, key=lambda a: a.status)]
    sent = None
    if service.notifier:
        sent = service.notifier.pass_on([one for one in answered if one.targets], now_s)
    matched = sum(bool(one.targets) for one in answered)
    many = "" if len(answered) == 1 else "s"
    told = f"{len(answered)} alert{many}, {matched} of them about a watched target"
    if posted.left_out:
        told += f"; Alertmanager left out {posted.left_out} more"
    return {
        "schema": SCHEMA,
        "t": round(now_s, 3),
        "status": posted.status,
        "text": told,
        "alerts": [dict(one.document) for one in answered],
        "sent": sent,
    }


class _Answering:
    """What the alerts of one post have in common."""

    def __init__(self, service: Known, now_s: float) -> None:
        self._now_s = now_s
        self._past = Past(service.reader)
        self._labels: dict[str, Mapping[str, str]] = {}
        self._now: dict[str, dict[EngineName, Diagnosis]] = {}
        self._candidates: list[Candidate] = []
        self._left = DOCUMENTS_MOST
        for spec in service.targets():
            state = service.board.get(spec.name)
            self._take(spec, state.diagnoses if state else ())

    def _take(self, spec: TargetSpec, diagnoses: Sequence[Diagnosis]) -> None:
        now = {(one.model, one.engine): one for one in diagnoses}
        known = now.keys() | self._past.engines(spec.name)
        self._labels[spec.name], self._now[spec.name] = spec.labels, now
        self._candidates.append(
            Candidate(
                spec.name,
                spec.address,
                spec.labels,
                models=frozenset(model for model, _ in known if model),
                engines=frozenset(engine for _, engine in known if engine),
            )
        )

    def of(self, alert: Alert) -> Answered:
        """One alert with what is known of it."""
        found = match(alert.labels, self._candidates)
        engines = [
            (hit.target, *name)
            for hit in found.hits
            for name in sorted(self._now[hit.target].keys() | self._past.engines(hit.target))
            if _is_meant(found, *name)
        ]
        looks: list[AlertContext] = []
        for target, model, engine in engines[: self._left]:
            now = self._now[target].get((model, engine))
            start, why = self._past.document(target, (model, engine), alert.starts_s)
            if now is not None or start is not None:
                looks.append(AlertContext(target, model, engine, start, now, why))
        left_out = len(engines[self._left :])
        self._left -= len(engines) - left_out
        lines = self._lines(alert, found, looks, left_out)
        return Answered(
            alert=alert,
            targets=tuple((hit.target, self._labels[hit.target]) for hit in found.hits),
            told=tuple(lines[1:]),
            document=_document(alert, found, looks, left_out, lines),
        )

    def _lines(
        self, alert: Alert, found: Match, looks: Sequence[AlertContext], left_out: int
    ) -> list[Line]:
        since = moment(alert.starts_s, self._now_s)
        lines = [
            Line("", f"{alert.name} {alert.status}, since {since}"),
            Line("", found.text),
        ]
        said = next(
            (alert.annotations[n] for n in ("summary", "description") if alert.annotations.get(n)),
            "",
        )
        lines += [Line("alert", said)] if said else []
        for look in looks[:LOOKS_TOLD]:
            lines += look.lines(alert.starts_s, self._now_s)
        untold = len(looks[LOOKS_TOLD:]) + left_out
        return [*lines, Line("", f"and {untold} engines more")] if untold else lines


def _is_meant(found: Match, model: str, engine: str) -> bool:
    """Whether an alert that names a model or an engine means this one; what could never be read
    has neither name."""
    named = found.model in (None, model) and found.engine in (None, engine)
    return named or not (model or engine)


def _document(
    alert: Alert, found: Match, looks: Sequence[AlertContext], left_out: int, lines: Sequence[Line]
) -> dict[str, Any]:
    return {
        "fingerprint": alert.fingerprint,
        "status": alert.status,
        "name": alert.name,
        "labels": dict(alert.labels),
        "starts": round(alert.starts_s, 3),
        "ends": None if alert.ends_s is None else round(alert.ends_s, 3),
        "match": {
            "text": found.text,
            "targets": [
                {"target": hit.target, "by": list(hit.by), "exact": hit.exact} for hit in found.hits
            ],
        },
        "diagnoses": [
            {
                "target": look.target,
                "model": look.model,
                "engine": look.engine,
                "at_start": look.start,
                "now": document(look.now) if look.now else None,
                "why": look.why,
            }
            for look in looks
        ],
        "left_out": left_out,
        "text": "\n".join(cut(line.plain(), LINE_MOST) for line in lines),
    }
