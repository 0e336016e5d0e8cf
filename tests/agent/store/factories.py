"""Cycles made by hand, and a store that has written them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from kneewatch.agent.captures import capture_name
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.records import Cycle, EngineCycle, Retention, engine_cycle
from kneewatch.agent.store.writer import Store
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.collector.scrape_history import Column, Restart
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Cause, Verdict
from kneewatch.rules.cascade import staged
from kneewatch.rules.rule import Severity, State
from tests.recordings import CAPTURES, WINDOW_S
from tests.waiting import PATIENCE_S, until


class Span(TypedDict):
    """From when to when."""

    from_s: float
    to_s: float


EVER: Span = {"from_s": 0.0, "to_s": math.inf}
START_S = 1_795_000_000.0
STEP_S = 5.0
KEEP_ALL = Retention()
COLUMNS = tuple(Column(f"counter_{at}", (("reason", "x"),)) for at in range(40))


def cause(cause_id: str, severity: Severity = Severity.WARNING, since_s: float = math.nan) -> Cause:
    """A cause without evidence."""
    return Cause(
        id=cause_id,
        confidence=0.9,
        severity=severity,
        summary=f"It is {cause_id}.",
        evidence=(),
        against=(),
        guide=("7.4",),
        lever="-",
        since_s=since_s,
    )


def diagnosis(
    t_s: float,
    *,
    target: str = "a",
    engine: str = "0",
    health: State = "ok",
    stage: int | None = 0,
    stage_since_s: float | None = None,
    causes: Sequence[Cause] = (),
    values: Mapping[str, float | None] | None = None,
    recommendations: Sequence[Advice] = (),
) -> Verdict:
    """A diagnosis that says this and no more."""
    since_s = t_s if stage_since_s is None else stage_since_s
    shown = UNKNOWN_STAGE if stage is None else staged(stage, since_s, Severity.OK, None, ())
    signals = {"running": 1.0} if values is None else values
    return Verdict(
        t_s=t_s,
        target=target,
        engine=engine,
        model="m",
        health=health,
        stage=shown,
        causes=causes,
        values=signals,
        window_s=60.0,
        judged_against="nothing",
        recommendations=recommendations,
    )


Raw = tuple[tuple[Column, ...], Sequence[float]]
"""Counters of a page and their values."""


def counted(total: float) -> Raw:
    """Counters that all stand at a number."""
    return COLUMNS, (total,) * len(COLUMNS)


def cycle(
    *diagnoses: Verdict,
    raw: Raw = ((), ()),
    config: Mapping[str, str] | None = None,
    started_s: float | None = None,
    restart: Restart | None = None,
    error: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Cycle:
    """The cycle that gave these diagnoses, all of one target."""
    engines = tuple(EngineCycle(d, *raw, config or {}, started_s, restart) for d in diagnoses)
    first = diagnoses[0]
    return Cycle(first.t_s, first.target, labels or {}, engines, error)


def settle(store: Store) -> None:
    """Wait until everything that was put is written, and the round that wrote it has ended."""

    def is_settled() -> bool:
        stats = store.stats()
        return not stats.queued and not stats.last_error

    store.flush()
    until(is_settled)


def cache_of(store: Store) -> EngineCache:
    """The writer's cache."""
    return store._store_file._cache  # pyright: ignore[reportPrivateUsage]


def written(path: Path, *cycles: Cycle, retention: Retention = KEEP_ALL) -> None:
    """Write cycles with a daemon that starts and ends."""
    store = Store.open(path, retention=retention, clock=lambda: cycles[-1].t_s)
    for scrape in cycles:
        store.put(scrape)
    store.close(PATIENCE_S)
    stats = store.stats()
    assert (stats.queued, stats.dropped, stats.last_error) == (0, 0, "")


def recorded(name: str) -> list[Cycle]:
    """The cycles of a recording, with everything that a daemon stores."""
    path = CAPTURES / f"{name}.jsonl.gz"
    stream = TargetStream(capture_name(path), Profile(window_s=WINDOW_S), Limits())
    cycles: list[Cycle] = []
    for entry in CaptureReader(path):
        diagnoses = stream.replay(entry)
        newest = {id(engine.newest): engine for engine in stream.monitor.engines}
        engines = [engine_cycle(verdict, newest.get(id(verdict)), None) for verdict in diagnoses]
        error = stream.monitor.last_error
        said = None if error is None else str(error)
        cycles.append(Cycle(entry.t_s, path.stem, {}, tuple(engines), said))
    return cycles
