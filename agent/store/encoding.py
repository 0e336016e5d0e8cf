"""Cycles and diagnosis documents, encoded for writing at a tenth of their size. Pure."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from kneewatch.agent.store.columns import LEVEL, DamagedError, to_bytes
from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.collector.history import Column, Restart
from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.intervals import Verdict, verdict
from kneewatch.diagnose.recommend.recommendation import MEASURED, Recommendation
from kneewatch.reports.diagnosis_json import document, recommendation_document, rounded
from kneewatch.reports.formatting import clock
from kneewatch.rules.cascade import forecast_s
from kneewatch.rules.rule_state import UNKNOWN

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


# --- Cycles made small: what of each is written, a tenth of what it took --------------------------


ERROR_LENGTH = 500
ENGINES_KNOWN = 20_000
"""More are not remembered: replicas come and go without end."""


@dataclass(frozen=True, slots=True)
class EngineName:
    """What tells an engine from all others."""

    target: str
    model: str
    engine: str
    replica: str


@dataclass(frozen=True, slots=True)
class PackedRecommendation:
    """A recommendation: `name` tells it from others, `document` is its JSON."""

    name: str
    document: bytes


@dataclass(frozen=True, slots=True)
class PackedEngine:
    """One engine after a scrape.

    `signals` are float32 in the order of `keys`, `counters` float64 in the order of `columns`;
    `document` is None where the last one still says it.
    """

    name: EngineName
    t_s: float
    keys: tuple[str, ...]
    signals: bytes
    columns: tuple[Column, ...]
    counters: bytes
    verdict: Verdict
    document: bytes | None
    recommendations: tuple[PackedRecommendation, ...]
    config: Mapping[str, str]
    started_s: float | None
    restart: Restart | None


@dataclass(frozen=True, slots=True)
class PackedCycle:
    """One target after a scrape. `bytes` is about what it takes in memory."""

    t_s: float
    target: str
    labels: Mapping[str, str]
    error: str | None
    engines: tuple[PackedEngine, ...]
    bytes: int


@dataclass(slots=True)
class _Last:
    """What was last kept of an engine's documents, and its recommendations as packed."""

    said: int | None = None
    made: Sequence[Recommendation] = ()
    packed: tuple[PackedRecommendation, ...] = ()


class Packer:
    """Makes cycles small. It knows what each engine's last document said."""

    def __init__(self) -> None:
        self._last: dict[EngineName, _Last] = {}
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}

    def forget(self, name: EngineName | None = None) -> None:
        """The last document of an engine (or of all) was not kept: the next one is."""
        if name is None:
            self._last.clear()
        else:
            self._last.pop(name, None)

    def pack(self, cycle: Cycle) -> PackedCycle:
        """A cycle as it is written."""
        engines = tuple([self._engine(cycle.target, one) for one in cycle.engines])
        size = 500 + sum(
            1000 + len(one.signals) + len(one.counters) + len(one.document or b"")
            for one in engines
        )
        error = None if cycle.error is None else cycle.error[:ERROR_LENGTH]
        return PackedCycle(cycle.t_s, cycle.target, cycle.labels, error, engines, size)

    def _engine(self, target: str, cycle: EngineCycle) -> PackedEngine:
        diagnosis, raw = cycle.diagnosis, cycle.raw
        if len(self._last) > ENGINES_KNOWN:
            self._last.clear()
        name = EngineName(target, diagnosis.model, diagnosis.engine, cycle.replica)
        last = self._last.setdefault(name, _Last())
        keys = tuple(diagnosis.values)
        values = [math.nan if value is None else value for value in diagnosis.values.values()]
        return PackedEngine(
            name,
            diagnosis.t_s,
            self._keys.setdefault(keys, keys),
            to_bytes(array("f", values)),
            () if raw is None else raw.columns,
            b"" if raw is None else to_bytes(array("d", raw.values)),
            verdict(diagnosis, restarted=cycle.restart is not None),
            _document(last, diagnosis),
            _recommendations(last, diagnosis),
            cycle.config,
            cycle.started_s,
            cycle.restart,
        )


def _document(last: _Last, diagnosis: Diagnosis) -> bytes | None:
    now = hash(said(diagnosis))
    if last.said == now:
        return None
    last.said = now
    return kept(diagnosis)


def _recommendations(last: _Last, diagnosis: Diagnosis) -> tuple[PackedRecommendation, ...]:
    # What is told stays the same object as long as it is told unchanged.
    if last.made is not diagnosis.recommendations:
        last.made = diagnosis.recommendations
        last.packed = tuple([_packed(made) for made in diagnosis.recommendations])
    return last.packed


def _packed(made: Recommendation) -> PackedRecommendation:
    document: dict[str, Any] = recommendation_document(made)
    changes = orjson.dumps(document["changes"]).decode()
    return PackedRecommendation(f"{made.id} {made.cause} {changes}", orjson.dumps(document))
