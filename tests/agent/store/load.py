"""Servers under load without end, made from recorded pages: real layouts, real shapes, no repeats.

Each step takes what a recorded server counted between two pages, times how busy the hour is, and
draws anew: events are Poisson, so no page is like another. Gauges follow the recording.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from msgspec import Struct

from kneewatch.agent.captures import capture_name
from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.diagnose.diagnosis_config import Profile
from tests.recordings import CAPTURES

BASE = "kv_pressure_cascade"
"""The recording whose page all servers have."""

BUSIER = 6.0
"""A recorded server had two CPU cores; one with a GPU counts more in the same time."""

DAY_S = 24 * 3600.0
SCENE_STEPS = (120, 480)
RESTART_EVERY_S = 1.5 * DAY_S

Places = Mapping[Series, int]


class Counted(Struct, frozen=True):
    """What one histogram counted in a step: observations by bucket, their sum."""

    buckets: tuple[int, ...]
    observed: tuple[tuple[int, float], ...]
    sum_at: int
    count_at: int
    sum: float
    count: float


class Step(Struct, frozen=True):
    """What a recorded server counted between two pages, and its gauges at the second."""

    counters: tuple[tuple[int, float], ...]
    histograms: tuple[Counted, ...]
    gauges: tuple[tuple[int, float], ...]


def pages(name: str) -> Iterator[Page]:
    """The pages of a recording that can be read."""
    path = CAPTURES / f"{name}.jsonl.gz"
    stream = TargetStream(capture_name(path), Profile(), Limits())
    for entry in CaptureReader(path):
        page = stream.read(entry)
        if isinstance(page, Page):
            yield page


@cache
def layout() -> Layout:
    """The page that all servers have."""
    return list(pages(BASE))[-1].layout


@cache
def places() -> Places:
    """Where each series stands on it."""
    return {series: at for at, series in enumerate(layout().series)}


def without_le(series: Series) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What the buckets of one histogram have in common."""
    labels = tuple(pair for pair in series.labels if pair[0] != "le")
    return series.name.removesuffix("_bucket"), labels


@cache
def histograms() -> Sequence[tuple[tuple[int, ...], int, int]]:
    """Positions of each histogram's buckets, sum and count on the page."""
    grouped: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for at, series in enumerate(layout().series):
        if series.name.endswith("_bucket"):
            grouped.setdefault(without_le(series), []).append(at)
    place_of = places()
    return [
        (
            tuple(at),
            place_of[Series(f"{name}_sum", labels)],
            place_of[Series(f"{name}_count", labels)],
        )
        for (name, labels), at in grouped.items()
    ]


@cache
def script(name: str) -> tuple[Step, ...]:
    """A recording's steps, on the page that all servers have."""
    read: list[list[float]] = []
    for page in pages(name):
        values = dict(page.samples())
        read.append([values.get(series, math.nan) for series in layout().series])
    # The first page a metric appears on tells nothing of what was counted before.
    return tuple(
        taken for before, after in pairwise(read) if (taken := step(before, after)) is not None
    )


def step(before: Sequence[float], after: Sequence[float]) -> Step | None:
    """What was counted between two pages; None across a restart."""
    part_of_histogram: set[int] = set()
    counted: list[Counted] = []
    for buckets, sum_at, count_at in histograms():
        part_of_histogram.update(buckets, (sum_at, count_at))
        rises = [after[at] - before[at] for at in buckets]
        own = [rise - below for rise, below in zip(rises, [0.0, *rises], strict=False)]
        if after[count_at] < before[count_at]:
            return None
        observed = tuple((index, n) for index, n in enumerate(own) if n > 0)
        if observed:
            rise = after[sum_at] - before[sum_at]
            counted.append(Counted(buckets, observed, sum_at, count_at, rise, rises[-1]))
    counters: list[tuple[int, float]] = []
    gauges: list[tuple[int, float]] = []
    for at, series in enumerate(layout().series):
        if at in part_of_histogram or math.isnan(after[at]):
            continue
        if series.name.endswith("_total"):
            if after[at] > before[at]:
                counters.append((at, after[at] - before[at]))
        elif not series.name.endswith(("_created", "_info")) and "process" not in series.name:
            gauges.append((at, after[at]))
    return Step(tuple(counters), tuple(counted), tuple(gauges))


def poisson(rng: random.Random, mean: float) -> int:
    """How many events there were where `mean` are expected."""
    if mean > 30:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    left, events = math.exp(-mean), 0
    drawn = rng.random()
    while drawn > left:
        drawn *= rng.random()
        events += 1
    return events


class Kind(Struct, frozen=True):
    """A kind of server: the recordings it goes through and how often, and how it sleeps."""

    scenes: Mapping[str, float]
    night_ratio: float = 0.3


HEALTHY = Kind({"healthy_light": 6, "prefix_good": 3, "long_output_decode_heavy": 1, "burst": 0.5})
FLEET: tuple[Kind, ...] = (
    HEALTHY,
    HEALTHY,
    HEALTHY,
    Kind({"healthy_light": 8, "kv_pressure_cascade": 1, "burst": 1}),
    Kind({"healthy_light": 4, "queue_overload": 1, "knee_sweep": 2}),
    Kind({"kv_pressure_cascade": 1}),
    Kind({"round_robin_two_replicas.r0": 1, "prefix_lost": 1}),
    Kind({"idle": 3, "healthy_light": 1}, night_ratio=0.0),
)
"""A node of eight: most are well most of the time, one is always in trouble."""


class Server:
    """One server's pages, and what the program makes of each."""

    def __init__(self, name: str, kind: Kind, *, seed: int, start_s: float) -> None:
        self.name, self._kind = name, kind
        self._rng = random.Random(seed)
        self._values = self._fresh(start_s)
        self._restart_s = start_s + self._rng.uniform(0.2, 1.0) * RESTART_EVERY_S
        self._steps: Iterator[Step] = iter(())
        self._stream = TargetStream(name, Profile(), Limits())

    def cycle(self, t_s: float) -> Cycle:
        """The cycle at `t_s`: the page a step later, judged."""
        if t_s >= self._restart_s:
            self._values = self._fresh(t_s)
            self._restart_s = t_s + self._rng.uniform(0.5, 1.5) * RESTART_EVERY_S
        self._advance(t_s)
        page = Page(layout(), self._values.copy())
        diagnoses = self._stream.judge(t_s, page)
        engines = tuple(
            EngineCycle(
                diagnosis,
                *engine.reader.counters(),
                engine.reader.config,
                engine.reader.history.started_s,
                engine.restart,
            )
            for diagnosis, engine in zip(diagnoses, self._stream.monitor.engines, strict=True)
        )
        return Cycle(t_s, self.name, {"node": "n1"}, engines)

    def _fresh(self, t_s: float) -> list[float]:
        values: list[float] = []
        for series in layout().series:
            created = series.name.endswith("_created") or "start_time" in series.name
            values.append(t_s if created else 1.0 if series.name.endswith("_info") else 0.0)
        return values

    def _advance(self, t_s: float) -> None:
        step = next(self._steps, None)
        if step is None:
            self._steps = self._scene()
            step = next(self._steps)
        day = 0.5 - 0.5 * math.cos(2 * math.pi * (t_s % DAY_S) / DAY_S)
        busy = self._kind.night_ratio + (1 - self._kind.night_ratio) * day
        busy *= BUSIER * self._rng.uniform(0.9, 1.1)
        values, rng = self._values, self._rng
        for at, rise in step.counters:
            values[at] += poisson(rng, rise * busy)
        for part in step.histograms:
            self._observe(part, busy)
        for at, value in step.gauges:
            noisy = value * rng.uniform(0.95, 1.05)
            values[at] = round(noisy) if value == int(value) else min(1.0, noisy)

    def _observe(self, part: Counted, busy: float) -> None:
        values, rng, seen = self._values, self._rng, 0
        ends = [*(index for index, _ in part.observed[1:]), len(part.buckets)]
        for (index, n), end in zip(part.observed, ends, strict=True):
            seen += poisson(rng, n * busy)
            for bucket in part.buckets[index:end]:
                values[bucket] += seen
        if seen:
            values[part.count_at] += seen
            values[part.sum_at] += part.sum * seen / part.count * rng.gauss(1.0, 0.05)

    def _scene(self) -> Iterator[Step]:
        names = list(self._kind.scenes)
        name = self._rng.choices(names, [self._kind.scenes[scene] for scene in names])[0]
        steps = script(name)
        for at in range(self._rng.randint(*SCENE_STEPS)):
            yield steps[at % len(steps)]


def fleet(*, start_s: float, seed: int = 1) -> list[Server]:
    """Eight servers."""
    return [
        Server(f"vllm-{at}", kind, seed=seed + at, start_s=start_s) for at, kind in enumerate(FLEET)
    ]
