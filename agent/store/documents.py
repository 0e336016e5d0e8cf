"""Diagnosis documents: when one is kept, how small, and as it was at any scrape. Pure.

A document is kept when anything in it moves that the signals of a scrape do not tell: those are
kept of every scrape, and are put back when the document is read. What a past moment said of its
causes is thus what was said then, to the last number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from kneewatch.agent.store.arrays import LEVEL, DamagedError
from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import MEASURED, Recommendation
from kneewatch.reports.document import document, recommendation_document, rounded
from kneewatch.reports.words import clock
from kneewatch.rules.cascade import forecast_s
from kneewatch.rules.state import UNKNOWN

SHIFTED = 0.5
"""A document that takes more than this share of a whole one is kept whole."""

CHAIN = 16
"""A document is kept as what differs from the one before it, the first of so many as what differs
from a whole one: a reader follows no more than these."""


def said(diagnosis: Diagnosis) -> Hashable:
    """What a diagnosis says, without the numbers that the signals of a scrape give back."""
    stage = diagnosis.stage
    return (
        diagnosis.health,
        None if stage is None else (stage.number, stage.severity, stage.since_s, stage.reasons),
        tuple([_concluded(cause, diagnosis.t_s) for cause in diagnosis.causes]),
        tuple(diagnosis.symptoms),
        tuple(
            [
                (one.state, one.since_s, one.missing, one.note, one.clearing, one.held)
                for one in diagnosis.findings
            ]
        ),
        tuple([_recommended(made) for made in diagnosis.recommendations]),
        tuple(diagnosis.unknown),
        tuple(diagnosis.values),
        diagnosis.judged_against,
        diagnosis.tier,
    )


def _concluded(cause: Cause, t_s: float) -> Cause:
    """All of a cause; of one that is concluded at each scrape no moment."""
    return replace(cause, seen_s=math.inf) if cause.seen_s == t_s else cause


def _recommended(made: Recommendation) -> Hashable:
    """All of a recommendation."""
    measured = tuple(made.before.items()), tuple(made.predicted.items())
    told = made.summary, made.risk, made.cost_usd_per_hour, made.unknown
    return made.id, made.cause, made.changes, measured, told, made.checks, made.verify, made.guide


def kept(diagnosis: Diagnosis) -> bytes:
    """The document as JSON, with its signals' names in place of their values."""
    made = document(diagnosis)
    made["signals"] = list(made["signals"])
    made["recommendations"] = [recommendation_document(one) for one in diagnosis.recommendations]
    for finding in made["findings"]:
        if finding["state"] != UNKNOWN:
            finding["value"] = None
    return orjson.dumps(made)


def squeeze(data: bytes, base: bytes | None) -> bytes:
    """A document, compressed; with a base, as what differs from that document."""
    packer = zlib.compressobj(LEVEL) if base is None else zlib.compressobj(LEVEL, zdict=base)
    return packer.compress(data) + packer.flush()


def expand(data: bytes, base: bytes | None) -> bytes:
    """The inverse of `squeeze`.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    unpacker = zlib.decompressobj() if base is None else zlib.decompressobj(zdict=base)
    try:
        return unpacker.decompress(data) + unpacker.flush()
    except zlib.error as error:
        raise DamagedError(f"a document cannot be read: {error}") from error


def at_scrape(
    stored: bytes, t_s: float, values: Mapping[str, float], *, averaged: bool, exact: bool
) -> dict[str, Any]:
    """The document as it was at a scrape. `values`: the scrape's signals, NaN where unknown;
    `averaged`: they are a minute's, not the scrape's own; `exact`: the document says what was said
    at every scrape until the next one, not only at its own.

    Raises:
        DamagedError: the document is not JSON.
    """
    try:
        made: dict[str, Any] = orjson.loads(stored)
        signals = {key: _number(values.get(key)) for key in made["signals"]}
        told_s, made["t"], made["signals"] = float(made["t"]), round(t_s, 3), signals
        _renew(made, signals)
        of_then = exact and not averaged
        for cause in made["causes"] if of_then else ():
            if cause.get("seen") == told_s:
                cause["seen"] = made["t"]
        if made["causes"] and not of_then and told_s != made["t"]:
            made["unknown"].insert(0, f"causes: they and their evidence are as of {clock(told_s)}")
        if averaged:
            made["unknown"].insert(0, "signals: so long ago, they are means of a minute")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"a document cannot be read: {error}") from error
    return made


def _renew(made: dict[str, Any], signals: Mapping[str, float | None]) -> None:
    """The numbers that a document repeats from its signals."""
    for finding in made["findings"]:
        if finding["state"] != UNKNOWN:
            finding["value"] = rounded(signals.get(finding["signal"]))
    for one in made["recommendations"]:
        for key in MEASURED.keys() & one["before"].keys():
            value = rounded(signals.get(MEASURED[key]))
            one["before"][key] = one["before"][key] if value is None else value
    stage = made["stage"]
    if stage["number"] is not None and stage["number"] < 2:
        left_s = forecast_s(signals)
        stage["forecast_s"] = None if left_s is None else round(left_s, 1)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
