"""A diagnosis as the JSON document kneewatch.diagnosis/1. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import isfinite
from typing import Any

from kneewatch.diagnose.case import Cause, Evidence
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Recommendation, presently
from kneewatch.rules.cascade import Stage
from kneewatch.rules.library import RULES
from kneewatch.rules.state import Finding

SCHEMA = "kneewatch.diagnosis/1"
LIBRARY_BOUNDS = {rule.id: rule.bounds for rule in RULES}
LARGEST = sys.float_info.max
DIGITS = 6
"""Significant digits of numbers in documents: more would be noise of the histograms."""


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON document of one diagnosis, ready for any JSON encoder: no NaN, no infinities."""
    return {
        "schema": SCHEMA,
        "t": round(diagnosis.t_s, 3),
        "target": diagnosis.target,
        "engine": diagnosis.engine,
        "model": diagnosis.model,
        "tier": diagnosis.tier,
        "health": diagnosis.health,
        "stage": stage_document(diagnosis.stage),
        "causes": [cause_document(cause) for cause in diagnosis.causes],
        "symptoms": list(diagnosis.symptoms),
        "findings": [finding_document(finding) for finding in diagnosis.findings],
        "recommendations": [
            recommendation_document(presently(made, diagnosis.values))
            for made in diagnosis.recommendations
        ],
        "signals": signals_document(diagnosis.values),
        "unknown": list(diagnosis.unknown),
        "window_s": round(diagnosis.window_s, 3),
        "judged_against": diagnosis.judged_against,
    }


def stage_document(stage: Stage | None) -> dict[str, Any]:
    """A stage; number and since are null while nothing can be read."""
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


def cause_document(cause: Cause) -> dict[str, Any]:
    """A cause with its evidence."""
    return {
        "id": cause.id,
        "confidence": cause.confidence,
        "severity": cause.severity.word,
        "since": round(cause.since_s, 3),
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
    }


def recommendation_document(made: Recommendation) -> dict[str, Any]:
    """A recommendation; numbers that are not known are left out of `before` and `predicted`."""
    return {
        "id": made.id,
        "cause": made.cause,
        "summary": made.summary,
        "changes": [
            {"flag": change.flag, "from": change.before, "to": change.after}
            for change in made.changes
        ],
        "before": dict(made.before),
        "predicted": dict(made.predicted),
        "cost_usd_per_hour": rounded(made.cost_usd_per_hour),
        "unknown": list(made.unknown),
        "checks": list(made.checks),
        "risk": made.risk,
        "verify": list(made.verify),
        "guide": list(made.guide),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """A finding; `note` says why it is not judged, and `bounds` are told where they are not those
    of the rule library."""
    row: dict[str, Any] = {
        "rule": finding.rule.id,
        "state": finding.state,
        "signal": finding.rule.signal,
        "value": rounded(finding.value),
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
    if finding.rule.bounds != LIBRARY_BOUNDS.get(finding.rule.id):
        row["bounds"] = {one.severity.word: rounded(one.threshold) for one in finding.rule.bounds}
    return row


def signals_document(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Signals by key, unrounded (a hundred to a line: rounding would be the dearest part of it);
    null where there is no value."""
    if isfinite(sum(filter(None, values.values()))):
        return dict(values)
    return {
        key: value if value is None or -LARGEST <= value <= LARGEST else None
        for key, value in values.items()
    }


def rounded(value: float | None) -> float | None:
    """A number with six significant digits; null for what JSON cannot hold."""
    if value is None or not isfinite(value):
        return None
    if value == 0 or value == int(value):
        return value
    return float(f"{value:.{DIGITS}g}")


def _evidence(item: Evidence) -> dict[str, Any]:
    return {
        "signal": item.signal,
        "value": rounded(item.value),
        "threshold": rounded(item.threshold),
        "text": item.text,
    }
