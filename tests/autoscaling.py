"""An autoscaler that follows `kneewatch_recommended_replicas` for an hour.

    python -m tests.autoscaling [LOAD|SEED ...]

A pool is scraped, diagnosed and exported by the fleet daemon's own code at simulated time; KEDA
sets its replicas, whose servers take three minutes to start. Printed are the replicas of each load,
beside what it needs; it ends with 1 where they swing or are too many.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.api.metrics import exposition
from kneewatch.agent.fleet import snapshot
from kneewatch.agent.fleet.queries import BACKLOG_RATIO
from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import Comparisons, diagnose
from kneewatch.diagnose.fleet.inventory import STEP_S, LabelMap, Past, Peak, Shape
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.rules.rule import WEEK_S
from tests.agent.api.serving import service_of, settings_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.living_engine import Work
from tests.living_fleet import MIN_S, LivingFleet, Pod, Pool, ScrapedPod, Series
from tests.living_source import Row, Scraped, SimulatedEngines, SimulatedMoment, SimulatedSource
from tests.recordings import NO_TARGETS

EPOCH_S = 1_790_000_000
SCRAPE_S, CYCLE_S, LOAD_S = 15, 30.0, 180.0
CALM_S, END_S = 12 * MIN_S, 72 * MIN_S
"""The load changes after the first, and then goes on for an hour."""

WORK = Work(capacity_tokens=160_000.0, seats=256.0)
FITS = WORK.capacity_tokens / (WORK.prompt_tokens + WORK.output_tokens / 2)
ITL_S = WORK.itl_s * (1 + FITS / 128)
CAPACITY_PER_S = FITS / (0.0325 + (WORK.output_tokens - 1) * ITL_S)
"""Requests/s that a replica serves with a full KV cache: 100 requests, of 7 s each."""

EXPORTED = re.compile(r"^kneewatch_recommended_replicas\{.*\} (\S+)$", re.MULTILINE)


class Load(Struct, frozen=True):
    """Demand as multiples of one replica's capacity, and what happens to replicas."""

    times: Callable[[float], float]
    replicas: int = 4
    plant: Callable[[Pool], None] = lambda _pool: None
    has_week: bool = True
    """Whether a week of history is known: without it, replicas are never removed."""


class Scaled(Struct, frozen=True):
    """A cycle: what was exported, the replicas that KEDA wants, and what the load fills."""

    t_s: float
    exported: int | None
    replicas: int
    times: float


class LiveScraped(Scraped):
    """What is scraped of a pool whose pods change while it is watched."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.fleet, from_s=0.0, to_s=-SCRAPE_S)
        self._pool, self._t_s = pool, -float(SCRAPE_S)
        self._pods: dict[str, tuple[ScrapedPod, dict[Series, Row]]] = {}

    def until(self, to_s: float) -> None:
        """Scrape on up to a moment."""
        while self._t_s + SCRAPE_S <= to_s:
            self._t_s += SCRAPE_S
            for at, pod in enumerate(self._pool.pods):
                if pod.born_s <= self._t_s < pod.gone_s + 2 * SCRAPE_S:
                    self._scrape(at, pod)

    def _scrape(self, at: int, pod: Pod) -> None:
        fresh = ScrapedPod(self._pool, pod, SCRAPE_S, self._pool.fleet.seed + at)
        scraped, rows = self._pods.setdefault(pod.address, (fresh, {}))
        shown = dict(scraped.shown(self._t_s))
        for series in shown.keys() - rows.keys():
            rows[series] = self.add(Row(series, [], self._pool.fleet.epoch_s))
        for series, row in rows.items():
            if series in shown or (row.values and row.values[-1] is not None):
                row.times.append(self._pool.fleet.epoch_s + self._t_s)
                row.values.append(shown.get(series))


def followed(load: Load, *, removes: bool = False, until_s: float = END_S) -> list[Scaled]:
    """An hour in which KEDA follows what is exported; with `removes` also where it falls."""
    fleet = LivingFleet(scrape_s=SCRAPE_S, epoch_s=EPOCH_S)
    pool = fleet.pool("Deployment", "chat", load.replicas, load_s=LOAD_S, work=WORK)
    pool.demand_per_s = lambda t_s: CAPACITY_PER_S * load.times(t_s)
    load.plant(pool)
    scraped = LiveScraped(pool)
    engines, comparisons = SimulatedEngines(Profile(window_s=60.0), scraped), Comparisons(scale=1.0)
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    now = [0.0]
    service = service_of(fleet=watch, settings=settings_of())
    service = replace(service, clock=lambda: now[0])
    most, cycles, t_s = 0.0, list[Scaled](), 3.0 * MIN_S

    def moment_at(_source: object, _log: object, at_s: float) -> SimulatedMoment:
        return SimulatedMoment(scraped, at_s)

    def past_of(_source: object, _scope: object, shape: Shape, _names: object, **_: float) -> Past:
        week = Peak(most, now[0], most, WEEK_S, 1.0)
        return Past({each.group: week for each in shape.members} if load.has_week else {})

    with (
        patch.object(snapshot, "QueryMoment", moment_at),
        patch.object(snapshot, "past_of", past_of),
    ):
        while t_s < until_s:
            t_s += CYCLE_S
            scraped.until(t_s)
            now[0] = EPOCH_S + t_s
            waiting, running = (
                sum(each.value for each in scraped.now(f"vllm:num_requests_{state}", now[0]))
                for state in ("waiting", "running")
            )
            if t_s % STEP_S == 0 and waiting <= BACKLOG_RATIO * running:
                most = max(most, running)
            config = FleetConfig("", LabelMap(), now[0], profile=Profile(window_s=60.0))
            observed = observe(SimulatedSource(scraped), config, engines)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            verdict = diagnose(observed, Profile(), comparisons)
            moment = FleetMoment.of(verdict, {}, NO_TARGETS, CYCLE_S)
            saw(watch, moment, seen_s=now[0])
            found = EXPORTED.search(exposition(service).decode())
            wanted, present = int(float(found[1])) if found else None, len(pool.living(t_s))
            if wanted is not None and (wanted > present or (removes and wanted < present)):
                pool.scale(t_s, wanted)
            cycles.append(Scaled(t_s, wanted, len(pool.living(t_s)), load.times(t_s)))
    return cycles


# --- Loads ----------------------------------------------------------------------------------------


def _ramp(low: float, high: float) -> Callable[[float], float]:
    def times(t_s: float) -> float:
        return low + (high - low) * min(1.0, max(0.0, (t_s - CALM_S) / (30 * MIN_S)))

    return times


def _step(low: float, high: float, *, until_s: float = END_S) -> Callable[[float], float]:
    return lambda t_s: high if CALM_S <= t_s < until_s else low


def _bursts(low: float, high: float) -> Callable[[float], float]:
    """A burst of 40 s every 5 minutes."""
    return lambda t_s: high if t_s >= CALM_S and t_s % (5 * MIN_S) < 40 else low


def _lost(pool: Pool) -> None:
    """A node is lost; its pod is replaced."""
    pod = pool.pods[0]
    pod.silent_s = CALM_S
    pod.deleted_s = pod.gone_s = CALM_S + 60
    pool.begin(CALM_S + 60, 1)


def _hung(pool: Pool) -> None:
    pool.pods[0].ails(CALM_S, CALM_S + 15 * MIN_S, hangs=True)


LOADS = {
    "calm": Load(_step(2.6, 2.6)),
    "overload 1.5x": Load(_step(1.4, 3.0), 2),
    "overload 3x": Load(_step(1.4, 6.0), 2),
    "one replica, overload 1.5x": Load(_step(0.7, 3.0), 2),
    "overload of 15 minutes": Load(_step(1.4, 3.5, until_s=CALM_S + 15 * MIN_S), 2),
    "ramp": Load(_ramp(1.4, 5.0), 2),
    "ramp to 20x": Load(_ramp(1.2, 24.0), 2),
    "night": Load(_ramp(5.0, 1.0), 8),
    "bursts": Load(_bursts(2.0, 6.0)),
    "lost replica": Load(_step(2.6, 2.6), plant=_lost),
    "hung replica": Load(_step(2.6, 2.6), plant=_hung),
    "hung replica of 2": Load(_step(1.2, 1.2), 2, _hung),
    "no past, overload 3x": Load(_step(1.4, 6.0), 2, has_week=False),
}


def drawn(seed: int) -> Load:
    """A load whose kind and sizes follow from the seed."""
    chance = random.Random(seed)
    replicas = chance.randint(2, 8)
    usual = replicas * chance.uniform(0.5, 0.75)
    times = chance.uniform(1.2, 10.0)
    shape = chance.choice(("ramp", "step", "bursts", "steady", "night"))
    if shape == "steady":
        return Load(_step(usual, usual), replicas, chance.choice((_lost, _hung)))
    if shape == "night":
        return Load(_ramp(usual, usual / times), replicas)
    if shape == "bursts":
        return Load(_bursts(usual, usual * min(times, 3.0)), replicas)
    until_s = END_S if chance.random() < 0.7 else CALM_S + chance.uniform(5, 30) * MIN_S
    step = _step(usual, usual * min(times, 4.0), until_s=until_s)
    curve = _ramp(usual, usual * times) if shape == "ramp" else step
    return Load(curve, replicas, has_week=chance.random() < 0.8)


def mistakes(load: Load, cycles: Sequence[Scaled]) -> Iterator[str]:
    """Whether replicas swing, are more than 1.3 times what the most of the load needs, or stay too
    few."""
    wanted = [each.replicas for each in cycles]
    turns = [after - before for before, after in pairwise(wanted) if after != before]
    if any(first > 0 > then or first < 0 < then for first, then in pairwise(turns)):
        yield "swings"
    most_times = max(each.times for each in cycles)
    allowed = max(load.replicas, math.ceil(round(most_times * SAFETY_DEFAULT, 6)))
    if max(wanted) > allowed:
        yield f"more than {allowed}"
    if wanted[-1] < cycles[-1].times:
        yield f"fewer than the load of {cycles[-1].times:g}"


def main(arguments: Sequence[str]) -> int:
    """Print each load and what is wrong."""
    failed = 0
    for name in arguments or LOADS:
        load = LOADS[name] if name in LOADS else drawn(int(name))
        for removes in (False, True):
            cycles = followed(load, removes=removes)
            found = [*mistakes(load, cycles)]
            failed += bool(found)
            steps = [
                cycles[0],
                *(
                    b
                    for a, b in pairwise(cycles)
                    if (a.replicas, a.exported) != (b.replicas, b.exported)
                ),
            ]
            print(f"{name}{', scaled down too' if removes else ''}: {'; '.join(found) or 'right'}")
            print(
                "   ",
                ", ".join(
                    f"{each.t_s / 60:g}' {each.times:.1f}x: {each.exported}/{each.replicas}"
                    for each in steps
                ),
            )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
