"""The answer to Alertmanager's webhook: each alert with the diagnosis of the targets it matches,
when it started and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kneewatch.agent.api.service import Service
from kneewatch.agent.notify.alert_context import (
    AlertContext,
    AlertHistory,
    Candidate,
    EngineName,
    Match,
    match,
)
from kneewatch.agent.notify.forward import Alert, DiagnosedAlert, payload_of
from kneewatch.agent.notify.message import Line
from kneewatch.agent.targets import TargetSpec
from kneewatch.diagnose.doc_links import OWN_DOCS, cause_page
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_json import document, with_docs
from kneewatch.reports.formatting import cut, moment

SCHEMA = "kneewatch.alerts/1"
DOCUMENTS_MAX = 32
"""Engines with documents in one answer: two documents each (start and now), about 20 kB apiece."""


ENGINES_SHOWN = 3
LINE_MAX = 300


def answer(payload: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """The document kneewatch.alerts/1 for a post of Alertmanager. New alerts are forwarded to the
    receivers.

    Raises:
        PayloadError: the payload is not one of Alertmanager's.
    """
    posted = payload_of(payload)
    now_s = service.clock()
    diagnoser = _AlertDiagnoser(service, now_s)
    # Firing alerts come first, so that a long answer leaves out resolved ones.
    alerts = [diagnoser.of(a) for a in sorted(posted.alerts, key=lambda a: a.status)]
    sent = None
    if service.notifier:
        sent = service.notifier.forward([alert for alert in alerts if alert.targets], now_s)
    matched = sum(bool(alert.targets) for alert in alerts)
    plural = "" if len(alerts) == 1 else "s"
    text = f"{len(alerts)} alert{plural}, {matched} of them about watched targets"
    if posted.left_out:
        text += f"; Alertmanager truncated {posted.left_out} more"
    return {
        "schema": SCHEMA,
        "t": round(now_s, 3),
        "status": posted.status,
        "text": text,
        "alerts": [dict(alert.document) for alert in alerts],
        "sent": sent,
    }


class _AlertDiagnoser:
    """Adds diagnoses to the alerts of one post."""

    def __init__(self, service: Service, now_s: float) -> None:
        self._now_s = now_s
        self._docs_url = service.settings.docs_url or OWN_DOCS
        self._history = AlertHistory(service.reader)
        self._labels: dict[str, Mapping[str, str]] = {}
        self._now: dict[str, dict[EngineName, Diagnosis]] = {}
        self._candidates: list[Candidate] = []
        self._left = DOCUMENTS_MAX
        for spec in service.targets():
            state = service.board.get(spec.name)
            self._add_target(spec, state.diagnoses if state else ())

    def _add_target(self, spec: TargetSpec, diagnoses: Sequence[Diagnosis]) -> None:
        now = {(diagnosis.model, diagnosis.engine): diagnosis for diagnosis in diagnoses}
        engines = now.keys() | self._history.engines(spec.name)
        self._labels[spec.name], self._now[spec.name] = spec.labels, now
        self._candidates.append(
            Candidate(
                spec.name,
                spec.address,
                spec.labels,
                models=frozenset(model for model, _ in engines if model),
                engines=frozenset(engine for _, engine in engines if engine),
            )
        )

    def of(self, alert: Alert) -> DiagnosedAlert:
        """One alert with its matched targets and their diagnoses."""
        alert_match = match(alert.labels, self._candidates)
        engines = [
            (matched.target, *name)
            for matched in alert_match.targets
            for name in sorted(
                self._now[matched.target].keys() | self._history.engines(matched.target)
            )
            if _is_about(alert_match, *name)
        ]
        contexts: list[AlertContext] = []
        for target, model, engine in engines[: self._left]:
            now = self._now[target].get((model, engine))
            start, why = self._history.document(target, (model, engine), alert.starts_s)
            if now is not None or start is not None:
                contexts.append(AlertContext(target, model, engine, start, now, why))
        left_out = len(engines[self._left :])
        self._left -= len(engines) - left_out
        lines = self._lines(alert, alert_match, contexts, left_out)
        cause_ids = [context.cause_id for context in contexts[:ENGINES_SHOWN]]
        pages = [cause_page(self._docs_url, cause_id) for cause_id in dict.fromkeys(cause_ids)]
        return DiagnosedAlert(
            alert=alert,
            targets=tuple(
                (matched.target, self._labels[matched.target]) for matched in alert_match.targets
            ),
            lines=tuple(lines[1:]),
            document=_document(
                alert,
                alert_match,
                contexts,
                left_out,
                [*lines, *(Line("docs", page) for page in pages if page)],
                self._docs_url,
            ),
            cause_id=next((cause_id for cause_id in cause_ids if cause_id), ""),
        )

    def _lines(
        self, alert: Alert, alert_match: Match, contexts: Sequence[AlertContext], left_out: int
    ) -> list[Line]:
        since = moment(alert.starts_s, self._now_s)
        lines = [
            Line("", f"{alert.name} {alert.status}, since {since}"),
            Line("", alert_match.text),
        ]
        annotation = next(
            (alert.annotations[n] for n in ("summary", "description") if alert.annotations.get(n)),
            "",
        )
        lines += [Line("alert", annotation)] if annotation else []
        for context in contexts[:ENGINES_SHOWN]:
            lines += context.lines(alert.starts_s, self._now_s)
        not_shown = len(contexts[ENGINES_SHOWN:]) + left_out
        return [*lines, Line("", f"and {not_shown} more engines")] if not_shown else lines


def _is_about(alert_match: Match, model: str, engine: str) -> bool:
    """Whether the alert is about this engine, by its model and engine labels. An engine of a target
    that was never read has neither name and always matches."""
    named = alert_match.model in (None, model) and alert_match.engine in (None, engine)
    return named or not (model or engine)


def _document(
    alert: Alert,
    alert_match: Match,
    contexts: Sequence[AlertContext],
    left_out: int,
    lines: Sequence[Line],
    docs_url: str,
) -> dict[str, Any]:
    return {
        "fingerprint": alert.fingerprint,
        "status": alert.status,
        "name": alert.name,
        "labels": dict(alert.labels),
        "starts": round(alert.starts_s, 3),
        "ends": None if alert.ends_s is None else round(alert.ends_s, 3),
        "match": {
            "text": alert_match.text,
            "targets": [
                {"target": matched.target, "by": list(matched.by), "exact": matched.exact}
                for matched in alert_match.targets
            ],
        },
        "diagnoses": [
            {
                "target": context.target,
                "model": context.model,
                "engine": context.engine,
                "at_start": with_docs(context.start, docs_url) if context.start else context.start,
                "now": document(context.now, docs_url=docs_url) if context.now else None,
                "why": context.why,
            }
            for context in contexts
        ],
        "left_out": left_out,
        "text": "\n".join(cut(line.plain(), LINE_MAX) for line in lines),
    }
