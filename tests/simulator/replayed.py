"""The recordings played again: the loads that made them, read off their pages and their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from tests.simulator.blocks import Chain
from tests.simulator.cpu_steps import CpuSteps, fitted, phases_of
from tests.simulator.engine import Engine
from tests.simulator.recorded import Scrape, finished
from tests.simulator.requests import Closed, Kind, Merged, Request, Source, between, fixed
from tests.simulator.scheduler import Launch

EVERY_S = 2.0

Kinds = Callable[[], Mapping[str, Kind]]


class Played(Struct, frozen=True, kw_only=True):
    """A recording and the load that made it. `kinds`: by phase, from which on they hold.

    `closed`: clients that wait for their answers. `every`: one more request each so many seconds.
    """

    name: str
    launch: Launch
    kinds: Kinds
    closed: bool = False
    every: tuple[str, float, Kind] | None = None
    steps: Callable[[CpuSteps], CpuSteps] = field(default=lambda steps: steps)


COMMON = Launch(
    num_gpu_blocks=4096,
    block_size=32,
    max_num_batched_tokens=2048,
    max_model_len=4096,
    max_num_seqs=64,
)
"""The recordings' common flags, and vLLM's defaults on a CPU."""


def _plain(prompt: int | tuple[int, int], output: int | tuple[int, int]) -> Kind:
    drawn = [
        fixed(tokens) if isinstance(tokens, int) else between(*tokens)
        for tokens in (prompt, output)
    ]
    return Kind(prompt=drawn[0], output=drawn[1])


def _shared(count: int, prefix: int, rest: int, output: int, chains: list[Chain]) -> Kind:
    return Kind(
        prompt=fixed(rest), output=fixed(output), prefixes=chains[:count], prefix_tokens=prefix
    )


def _prefix_lost() -> Mapping[str, Kind]:
    system = [Chain()]
    good = _shared(1, 1500, 40, 40, system)
    return {"fresh": good, "prefix_lost": _plain(1544, 40), "prefix_back": good}


def _prefix_churn() -> Mapping[str, Kind]:
    chains = [Chain() for _ in range(48)]
    few = _shared(8, 1024, 32, 32, chains)
    return {"fresh": few, "churn": _shared(48, 1024, 32, 32, chains), "fits_again": few}


def _cascade() -> Mapping[str, Kind]:
    growing = _plain(100, 300)
    return {"fresh": growing, "kv_near_full": _plain(256, 64), "preempting": growing}


def _adapters(count: int) -> Kind:
    return replace(_plain(64, 48), adapters=tuple(f"a{at}" for at in range(count)))


RECORDINGS = (
    Played(
        name="healthy_light",
        launch=replace(COMMON, max_model_len=8192),
        kinds=lambda: {"fresh": _plain((100, 300), (40, 80))},
    ),
    Played(name="burst", launch=COMMON, kinds=lambda: {"fresh": _plain(100, 60)}),
    Played(
        name="queue_overload",
        launch=replace(COMMON, max_num_seqs=8),
        kinds=lambda: {"fresh": _plain(100, 60)},
    ),
    Played(
        name="kv_pressure_cascade",
        closed=True,
        kinds=_cascade,
        launch=replace(COMMON, num_gpu_blocks=160, max_num_seqs=128, max_model_len=2048),
    ),
    Played(name="knee_sweep", launch=COMMON, closed=True, kinds=lambda: {"fresh": _plain(64, 64)}),
    Played(
        name="prefix_good",
        launch=replace(COMMON, max_num_seqs=32),
        kinds=lambda: {"fresh": _shared(1, 1500, 40, 40, [Chain()])},
    ),
    Played(
        name="prefix_off",
        launch=replace(COMMON, max_num_seqs=32, enable_prefix_caching=False),
        kinds=lambda: {"fresh": _shared(1, 1500, 40, 40, [Chain()])},
    ),
    Played(name="prefix_lost", launch=replace(COMMON, max_num_seqs=32), kinds=_prefix_lost),
    Played(
        name="prefix_churn",
        launch=replace(COMMON, num_gpu_blocks=512, max_num_seqs=32),
        kinds=_prefix_churn,
    ),
    Played(
        name="itl_spikes_no_chunked",
        closed=True,
        launch=replace(
            COMMON,
            max_num_seqs=32,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=False,
        ),
        kinds=lambda: {"fresh": _plain(32, 200)},
        every=("with_long_prompts", 6.0, _plain(6000, 4)),
    ),
    Played(
        name="itl_smooth_chunked",
        closed=True,
        launch=replace(COMMON, max_num_seqs=32, max_model_len=8192, max_num_batched_tokens=256),
        kinds=lambda: {"fresh": _plain(32, 200)},
        every=("with_long_prompts", 6.0, _plain(6000, 4)),
    ),
    Played(
        name="lora_thrash",
        closed=True,
        launch=replace(COMMON, max_num_seqs=16, max_loras=1),
        kinds=lambda: {
            "fresh": _adapters(1),
            "six_adapters": _adapters(6),
            "one_adapter_again": _adapters(1),
        },
        # The adapters' own products, in every step: measured in the recording's first phase.
        steps=lambda steps: replace(steps, base_s=2.2 * steps.base_s),
    ),
    Played(
        name="long_output_decode_heavy",
        launch=replace(COMMON, max_num_seqs=32, max_model_len=8192),
        closed=True,
        kinds=lambda: {"fresh": _plain(32, 600)},
    ),
    Played(
        name="long_prompt_prefill_heavy",
        launch=replace(COMMON, max_num_seqs=32, max_model_len=8192),
        closed=True,
        kinds=lambda: {"fresh": _plain(3000, 8)},
    ),
)


class Again:
    """Arrivals as a recording's pages tell them, spread at random between two pages."""

    def __init__(self, kind: Kind, rows: Sequence[Scrape], rng: Random) -> None:
        self.kind, self._rng = kind, rng
        self._times = sorted(self._spread(rows))
        self._at = 0

    def _spread(self, rows: Sequence[Scrape]) -> Iterator[float]:
        for earlier, later in pairwise(rows):
            count = _begun(later) - _begun(earlier)
            for _ in range(max(0, round(count))):
                yield self._rng.uniform(earlier.t_s, later.t_s) - rows[0].t_s

    def next_s(self) -> float:
        """When the next one comes."""
        return self._times[self._at] if self._at < len(self._times) else math.inf

    def take(self) -> Request:
        """The next one."""
        self._at += 1
        return self.kind.make(self._times[self._at - 1], self._rng)

    def ended(self, request: Request, now_s: float) -> None:
        """Nobody waits for it."""


class Regular:
    """A request each so many seconds, from a moment to another."""

    def __init__(self, kind: Kind, from_s: float, to_s: float, every_s: float, rng: Random) -> None:
        self._kind, self._rng, self._next_s = kind, rng, from_s
        self._to_s, self._every_s = to_s, every_s

    def next_s(self) -> float:
        """When the next one comes."""
        return self._next_s if self._next_s < self._to_s - 1 else math.inf

    def take(self) -> Request:
        """The next one."""
        arrived_s, self._next_s = self._next_s, self._next_s + self._every_s
        return self._kind.make(arrived_s, self._rng)

    def ended(self, request: Request, now_s: float) -> None:
        """Nobody waits for it."""


def _begun(row: Scrape) -> float:
    return finished(row.values) + in_flight(row)


def in_flight(row: Scrape) -> float:
    """Requests that the server has."""
    return row.values["num_requests_running"] + row.values["num_requests_waiting"]


def simulated(played: Played, rows: list[Scrape], rng: Random) -> list[Scrape]:
    """What the pages would have said."""
    start_s = rows[0].t_s
    phases = phases_of(played.name)
    kinds = played.kinds()
    kind = kinds["fresh"]
    load: Again | Closed = Closed(kind, rng) if played.closed else Again(kind, rows, rng)
    source: Source = load
    if played.every is not None:
        label, every_s, more = played.every
        from_s, to_s, _ = phases[label]
        source = Merged(load, Regular(more, from_s - start_s, to_s - start_s, every_s, rng))
    engine = Engine(played.launch, played.steps(cpu()), source, rng)
    scrapes = list[Scrape]()
    for row in rows:
        engine.run(row.t_s - start_s)
        scrapes.append(Scrape(row.t_s, page_values(engine)))
        for label, (from_s, to_s, _) in phases.items():
            if from_s - EVERY_S / 2 <= row.t_s < to_s:
                load.kind = kinds.get(label, load.kind)
                # Beside a closed loop's clients nothing must be in flight when they are counted.
                if isinstance(load, Closed) and (not played.every or label != played.every[0]):
                    load.resize(clients(rows, phases[label]), engine.now_s)
    return scrapes


def clients(rows: list[Scrape], phase: tuple[float, float, float]) -> int:
    """The clients of a closed loop: the most requests in flight in the phase's last pages."""
    seen = [in_flight(row) for row in rows if phase[0] <= row.t_s <= phase[1]]
    return round(max(seen[-3:], default=0.0))


@cache
def cpu() -> CpuSteps:
    """The machine of the recordings."""
    return fitted()


def page_values(engine: Engine) -> dict[str, float]:
    """The engine's values by the names of `recorded.values_of`."""
    scheduler, counters = engine.scheduler, engine.counters
    values = dict(counters.counts)
    values["num_requests_running"] = len(scheduler.running)
    values["num_requests_waiting"] = len(scheduler.waiting)
    values["num_requests_waiting_by_reason|reason=deferred"] = scheduler.deferred
    values["kv_cache_usage_perc"] = scheduler.blocks.usage_ratio
    values["prefix_cache_queries_total"] = scheduler.queried_tokens
    values["prefix_cache_hits_total"] = scheduler.hit_tokens
    for name, histogram in counters.histograms.items():
        values[f"{name}_sum"], values[f"{name}_count"] = histogram.sum, sum(histogram.own)
    return values
