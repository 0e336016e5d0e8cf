"""Cycles made small: what of each is written, a tenth of what it took. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kneewatch.agent.store.arrays import to_bytes
from kneewatch.agent.store.cycle import Cycle, EngineCycle
from kneewatch.agent.store.documents import kept, said
from kneewatch.agent.store.intervals import Verdict, verdict
from kneewatch.collector.history import Column, Restart
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.reports.document import recommendation_document

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
