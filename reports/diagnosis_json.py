"""Encodes a diagnosis as the JSON document kneewatch.diagnosis/1, and decodes it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from math import isfinite, nan
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.causes.evidence import Cause, Counterfactual, Evidence
from kneewatch.diagnose.deployment.server_facts import Fact, ServerFacts
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.engine.diagnosis import SYMPTOMS, Diagnosis
from kneewatch.diagnose.recommend.recommendation import (
    Change,
    Recommendation,
    Value,
    with_current_values,
)
from kneewatch.rules.cascade import NAMES, Stage
from kneewatch.rules.library import RULES, slo_rules
from kneewatch.rules.rule import UNKNOWN, WORDS, Bound, Clearing, Finding, Rule, Severity

SCHEMA = "kneewatch.diagnosis/1"
LIBRARY_BOUNDS = {rule.id: rule.bounds for rule in RULES}
LARGEST = sys.float_info.max
DIGITS = 6
"""Significant digits of numbers in documents. The values of histograms are not more precise."""


def document(diagnosis: Diagnosis, *, docs_url: str = "") -> dict[str, Any]:
    """The JSON document of a diagnosis. It contains no NaN and no infinity, so any JSON encoder can
    write it.

    With `docs_url`, each cause contains the address of its page.
    """
    server = diagnosis.server
    return {
        "schema": SCHEMA,
        "t": round(diagnosis.t_s, 3),
        "target": diagnosis.target,
        "engine": diagnosis.engine,
        "model": diagnosis.model,
        "tier": diagnosis.tier,
        "health": diagnosis.health,
        "stage": stage_document(diagnosis.stage),
        "causes": [cause_document(cause, docs_url=docs_url) for cause in diagnosis.causes],
        "symptoms": list(diagnosis.symptoms),
        "symptom_actions": symptom_actions(diagnosis.symptoms),
        "findings": [finding_document(finding) for finding in diagnosis.findings],
        "recommendations": [
            recommendation_document(with_current_values(recommendation, diagnosis.values))
            for recommendation in diagnosis.recommendations
        ],
        "signals": signals_document(diagnosis.values),
        "unknown": list(diagnosis.unknown),
        "window_s": round(diagnosis.window_s, 3),
        "judged_against": diagnosis.judged_against,
        **({} if server is None else {"server": server_document(server, diagnosis.t_s)}),
    }


def symptom_actions(symptoms: Iterable[str]) -> dict[str, str]:
    """The action that the guide recommends for each symptom."""
    return {symptom: SYMPTOMS[symptom].action for symptom in symptoms if symptom in SYMPTOMS}


def server_document(server: ServerFacts, t_s: float) -> dict[str, Any]:
    """The facts about a server. Their ages are in seconds before `t_s`."""
    return {
        "facts": [
            {
                "name": fact.name,
                "value": fact.value,
                "source": fact.source,
                "age_s": round(max(t_s - fact.read_s, 0.0), 3),
            }
            for fact in server.facts
        ],
        "notes": list(server.notes),
        "unknown": [{"name": name, "supply": supply} for name, supply in server.unknown],
    }


def with_docs(stored: Mapping[str, Any], docs_url: str) -> dict[str, Any]:
    """A copy of a stored document, with the address of each cause's page added. A document without
    a list of causes is not changed."""
    causes: object = stored.get("causes")
    if not isinstance(causes, list):
        return dict(stored)
    linked: list[object] = []
    for cause in cast("list[object]", causes):
        if not isinstance(cause, dict):
            linked.append(cause)
            continue
        fields = cast("dict[str, Any]", cause)
        docs = cause_page(docs_url, str(fields.get("id")))
        linked.append({**fields, "docs": docs} if docs else fields)
    return {**stored, "causes": linked}


def stage_document(stage: Stage | None) -> dict[str, Any]:
    """A stage as JSON. If nothing could be read, its number and start are null."""
    if stage is None:
        return {
            "number": None,
            "name": "unknown",
            "since": None,
            "forecast_s": None,
            "severity": None,
            "reasons": [],
        }
    forecast_s = stage.forecast_s
    return {
        "number": stage.number,
        "name": stage.name,
        "since": round(stage.since_s, 3),
        "forecast_s": None if forecast_s is None else round(forecast_s, 1),
        "severity": stage.severity.word,
        "reasons": list(stage.reasons),
    }


def cause_document(cause: Cause, *, docs_url: str = "") -> dict[str, Any]:
    """A cause as JSON, with its evidence and the address of its page. There is no address without
    `docs_url`."""
    docs = cause_page(docs_url, cause.id)
    return {
        "id": cause.id,
        "confidence": cause.confidence,
        "severity": cause.severity.word,
        "since": round(cause.since_s, 3) if isfinite(cause.since_s) else None,
        "seen": round(cause.seen_s, 3) if isfinite(cause.seen_s) else None,
        "summary": cause.summary,
        "evidence": [_evidence(item) for item in cause.evidence],
        "against": [_evidence(item) for item in cause.against],
        "guide": list(cause.guide),
        "lever": cause.lever,
        "explains": list(cause.explains),
        "unless": [
            {
                "signal": point.signal,
                "now": rounded(point.now),
                "at": rounded(point.at),
                "above": point.above,
            }
            for point in cause.unless
        ],
        **({"docs": docs} if docs else {}),
    }


def recommendation_document(recommendation: Recommendation) -> dict[str, Any]:
    """A recommendation as JSON. Unknown numbers are left out of `before` and `predicted`."""
    return {
        "id": recommendation.id,
        "cause": recommendation.cause,
        "summary": recommendation.summary,
        "changes": [
            {"flag": change.flag, "from": change.before, "to": change.after}
            for change in recommendation.changes
        ],
        "before": dict(recommendation.before),
        "predicted": dict(recommendation.predicted),
        "cost_usd_per_hour": rounded(recommendation.cost_usd_per_hour),
        "unknown": list(recommendation.unknown),
        "checks": list(recommendation.checks),
        "risk": recommendation.risk,
        "verify": list(recommendation.verify),
        "guide": list(recommendation.guide),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """A finding as JSON. `note` is the reason why it is not judged. `bounds` is included only if
    they differ from the bounds in the rule library."""
    rule, value = finding.rule, finding.value
    row: dict[str, Any] = {
        "rule": rule.id,
        "state": finding.state,
        "signal": rule.signal,
        "value": value if value is None else rounded(value),
        "missing": list(finding.missing),
    }
    if finding.since_s is not None:
        row["since"] = round(finding.since_s, 3)
    if finding.note:
        row["note"] = finding.note
    if finding.clearing is not None:
        row["clearing_since_s"] = round(finding.clearing.since_s, 3)
        row["was"] = rounded(finding.clearing.was)
        row["held"] = finding.held.word
    if rule.bounds != LIBRARY_BOUNDS.get(rule.id):
        row["bounds"] = {bound.severity.word: rounded(bound.threshold) for bound in rule.bounds}
    return row


def signals_document(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Signals by key, null without a value. Values are not rounded, because rounding a hundred of
    them would take most of the time for the document."""
    if isfinite(sum(filter(None, values.values()))):
        return dict(values)
    return {
        key: value if value is None or -LARGEST <= value <= LARGEST else None
        for key, value in values.items()
    }


def rounded(value: float | None) -> float | None:
    """A number rounded to six significant digits. None for a number that JSON cannot represent."""
    if value is None or not isfinite(value):
        return None
    return value if value % 1 == 0 else float(f"{value:.{DIGITS}g}")


def _evidence(item: Evidence) -> dict[str, Any]:
    return {
        "signal": item.signal,
        "value": rounded(item.value),
        "threshold": rounded(item.threshold),
        "text": item.text,
    }


# The JSON document kneewatch.diagnosis/1 as a diagnosis again: the inverse of `document`. Pure.
#
# So that one renderer serves live, past and remote diagnoses. Unknown keys are ignored, because
# keys are only ever added; keys that an older document lacks get a default.


LATEST_S = 253_402_300_799.0
"""The end of the year 9999 in Unix seconds. Later times cannot be formatted."""
SHOWN = 60
SEVERITIES = {word: severity for severity, word in WORDS.items()}
STATES = {**SEVERITIES, UNKNOWN: Severity.OK}


ANY_TARGETS = {
    "ttft_p99_s": 1.0,
    "itl_p99_s": 1.0,
    "benchmark_ttft_p99_s": 1.0,
    "benchmark_gpu_ratio": 1.0,
}
BY_TARGET = slo_rules(**ANY_TARGETS)
RULES_BY_ID = {
    rule.id: rule for rule in (*RULES, *(replace(rule, bounds=()) for rule in BY_TARGET))
}
"""Rules by id. Rules for SLO targets have no bounds here, because the document contains the user's
bounds."""

FROM_DOCUMENT = "setting"
"""Source of a bound that was decoded from a document."""


class DocumentError(KneewatchError):
    """The document is not a kneewatch.diagnosis/1. The message names the wrong key."""


def diagnosis_of(document: Mapping[str, Any]) -> Diagnosis:
    """Decode a diagnosis.

    Symptoms that this version does not know are left out. A rule has the bounds of the rule
    library, unless the document contains other bounds.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    if not isinstance(cast("object", document), Mapping):
        raise DocumentError(f"not a {SCHEMA} document: {_shown(document)} is not a JSON object")
    whole = _Part(document, "")
    if whole.text("schema") != SCHEMA:
        raise whole.wrong("schema", f"{SCHEMA!r}")
    t_s = whole.moment("t")
    if t_s is None:
        raise whole.wrong("t", "a time")
    stage = whole.part("stage")
    return Diagnosis(
        t_s=t_s,
        target=whole.text("target"),
        engine=whole.text("engine", ""),
        model=whole.text("model", ""),
        tier=whole.text("tier", "") or None,
        health=whole.word("health", STATES),
        stage=_stage(stage, t_s) if stage else None,
        causes=[_cause(part, t_s) for part in whole.parts("causes")],
        symptoms=[symptom for symptom in whole.texts("symptoms") if symptom in SYMPTOMS],
        findings=[_finding(part) for part in whole.parts("findings")],
        values=whole.numbers("signals"),
        unknown=list(whole.texts("unknown")),
        window_s=whole.number("window_s") or 0.0,
        judged_against=whole.text("judged_against", "nothing that is known"),
        recommendations=tuple(_recommendation(part) for part in whole.parts("recommendations")),
        server=_server(server, t_s) if (server := whole.part("server")) else None,
    )


def _server(part: _Part, t_s: float) -> ServerFacts:
    facts = [
        Fact(
            fact.text("name"),
            "" if (value := _value(fact, "value")) is None else value,
            fact.text("source"),
            t_s - (fact.number("age_s") or 0.0),
        )
        for fact in part.parts("facts")
    ]
    unknown = [(entry.text("name"), entry.text("supply")) for entry in part.parts("unknown")]
    return ServerFacts(tuple(facts), part.texts("notes"), tuple(unknown))


class _Part(Struct, frozen=True):
    """A JSON object within the document, and its path. A null value counts as absent."""

    values: Mapping[str, Any]
    place: str

    def wrong(self, key: str, expected: str) -> DocumentError:
        said = _shown(self.values[key]) if key in self.values else "missing"
        return DocumentError(
            f"not a {SCHEMA} document: {self.place}{key} must be {expected}, it is {said}"
        )

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def word(self, key: str, words: Iterable[str], default: str | None = None) -> str:
        word, allowed = self.text(key, default), tuple(words)
        if word not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return word

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        try:
            return None if value is None else _finite(value)
        except (ValueError, OverflowError):
            raise self.wrong(key, "a finite number") from None

    def moment(self, key: str) -> float | None:
        t_s = self.number(key)
        if t_s is not None and not 0 <= t_s <= LATEST_S:
            raise self.wrong(key, "a time in seconds")
        return t_s

    def numbers(self, key: str) -> dict[str, float | None]:
        part = self.part(key)
        return {name: part.number(name) for name in part.values} if part else {}

    def present_numbers(self, key: str) -> dict[str, float]:
        return {name: value for name, value in self.numbers(key).items() if value is not None}

    def texts(self, key: str) -> tuple[str, ...]:
        rows = self._rows(key)
        if not all(isinstance(row, str) for row in rows):
            raise self.wrong(key, "a list of texts")
        return tuple(cast("list[str]", rows))

    def part(self, key: str) -> _Part | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return _Part(cast("Mapping[str, Any]", value), f"{self.place}{key}.")

    def parts(self, key: str) -> list[_Part]:
        rows = self._rows(key)
        if not all(isinstance(row, Mapping) for row in rows):
            raise self.wrong(key, "a list of objects")
        return [
            _Part(cast("Mapping[str, Any]", row), f"{self.place}{key}[{at}].")
            for at, row in enumerate(rows)
        ]

    def _rows(self, key: str) -> list[object]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return cast("list[object]", value)


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("no finite number")
    return float(value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."


def _stage(part: _Part, t_s: float) -> Stage | None:
    number = part.number("number")
    if number is None:
        return None
    if number not in range(len(NAMES)):
        raise part.wrong("number", f"0 to {len(NAMES) - 1}")
    since_s = part.moment("since")
    return Stage(
        number=int(number),
        since_s=t_s if since_s is None else since_s,
        severity=SEVERITIES[part.word("severity", SEVERITIES, Severity.OK.word)],
        forecast_s=part.number("forecast_s"),
        reasons=part.texts("reasons"),
    )


def _cause(part: _Part, t_s: float) -> Cause:
    since_s, seen_s = part.moment("since"), part.moment("seen")
    return Cause(
        id=part.text("id"),
        confidence=part.number("confidence") or 0.0,
        severity=SEVERITIES[part.word("severity", SEVERITIES)],
        summary=part.text("summary", ""),
        evidence=tuple(_read_evidence(item) for item in part.parts("evidence")),
        against=tuple(_read_evidence(item) for item in part.parts("against")),
        guide=part.texts("guide"),
        lever=part.text("lever", ""),
        since_s=t_s if since_s is None else since_s,
        seen_s=nan if seen_s is None else seen_s,
        explains=part.texts("explains"),
        unless=tuple(point for item in part.parts("unless") if (point := _counterfactual(item))),
    )


def _counterfactual(part: _Part) -> Counterfactual | None:
    now, at = part.number("now"), part.number("at")
    if now is None or at is None:
        return None
    return Counterfactual(part.text("signal"), now, at, bool(part.values.get("above")))


def _read_evidence(part: _Part) -> Evidence:
    value, threshold = part.number("value"), part.number("threshold")
    return Evidence(part.text("signal"), value, threshold, part.text("text", ""))


def _finding(part: _Part) -> Finding:
    rule_id, signal = part.text("rule"), part.text("signal", "")
    rule = RULES_BY_ID.get(rule_id) or Rule(
        rule_id, signal, (), "a rule of another version", "", ()
    )
    if signal and rule.signal != signal:
        rule = replace(rule, signal=signal, bounds=())
    if bounds := part.part("bounds"):
        rule = replace(rule, bounds=tuple(_bounds(bounds)))
    state = part.word("state", STATES)
    return Finding(
        rule,
        state,
        STATES[state],
        part.number("value"),
        part.moment("since"),
        part.texts("missing"),
        part.text("note", ""),
        _clearing(part),
    )


def _bounds(part: _Part) -> Iterable[Bound]:
    for word, severity in SEVERITIES.items():
        threshold = part.number(word)
        if severity and threshold is not None:
            yield Bound(severity, threshold, FROM_DOCUMENT)


def _clearing(part: _Part) -> Clearing | None:
    since_s = part.moment("clearing_since_s")
    if since_s is None:
        return None
    held = SEVERITIES[part.word("held", SEVERITIES, Severity.INFO.word)]
    return Clearing(since_s, part.number("was"), held)


def _recommendation(part: _Part) -> Recommendation:
    return Recommendation(
        id=part.text("id"),
        cause=part.text("cause", ""),
        changes=tuple(_change(row) for row in part.parts("changes")),
        summary=part.text("summary", ""),
        predicted=part.present_numbers("predicted"),
        cost_usd_per_hour=part.number("cost_usd_per_hour"),
        checks=part.texts("checks"),
        risk=part.text("risk", ""),
        verify=part.texts("verify"),
        guide=part.texts("guide"),
        before=part.present_numbers("before"),
        unknown=part.texts("unknown"),
    )


def _change(part: _Part) -> Change:
    return Change(part.text("flag"), _value(part, "from"), _value(part, "to"))


def _value(part: _Part, key: str) -> Value:
    value = part.values.get(key)
    if isinstance(value, bool | str):
        return value
    number = part.number(key)
    return value if isinstance(value, int) else number
