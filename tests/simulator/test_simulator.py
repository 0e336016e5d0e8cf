"""The simulator against itself and against the recordings: books that balance, honest errors."""

from __future__ import annotations

import math
from random import Random

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import entry_of, line_of
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from tests.simulator import against
from tests.simulator.blocks import Blocks, Chain
from tests.simulator.cases import LASTS_S, Case, cases
from tests.simulator.engine import Engine
from tests.simulator.page import START_S, PageWriter
from tests.simulator.recorded import values_of
from tests.simulator.replayed import cpu
from tests.simulator.requests import Closed, Kind, between
from tests.simulator.scheduler import Launch
from tests.simulator.server import Server

VERSIONS = ("0.8.5-rendered", "0.10.0-rendered", "0.14.0-rendered", "0.20.2-rendered",
            "0.28.0-loaded", "0.32.0-loaded")  # fmt: skip

MEDIAN_MOST = {
    "kv_usage_ratio": 0.02,
    "running": 0.15,
    "waiting": 0.25,
    "deferred": 0.2,
    "preemption_per_s": 0.25,
    "hit_ratio": 0.05,
    "ttft_s": 0.35,
    "itl_s": 0.15,
    "completed_per_s": 0.1,
}
"""The median error of each signal over all phases: a difference for ratios, else relative."""

WORST_MOST = {"kv_usage_ratio": 0.15, "hit_ratio": 0.2, "preemption_per_s": 0.5, "deferred": 0.3}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    return against.errors(against.compared(seed=1))


def test_every_signal_of_the_recordings_is_compared(errors: dict[str, list[float]]) -> None:
    assert set(errors) == set(MEDIAN_MOST)
    assert len(errors["ttft_s"]) >= 30
    assert len(errors["preemption_per_s"]) >= 2


@pytest.mark.parametrize("signal", MEDIAN_MOST)
def test_the_simulator_is_near_the_recordings(errors: dict[str, list[float]], signal: str) -> None:
    sizes = sorted(abs(error) for error in errors[signal])
    assert sizes[len(sizes) // 2] <= MEDIAN_MOST[signal]
    assert sizes[-1] <= WORST_MOST.get(signal, math.inf)


SMALL = Launch(num_gpu_blocks=160, max_num_batched_tokens=256)


def small(seed: int, clients: int, launch: Launch = SMALL) -> Engine:
    """An engine whose cache is too small for its clients."""
    source = Closed(Kind(prompt=between(50, 400), output=between(20, 400)), Random(seed))
    source.resize(clients, 0.0)
    return Engine(launch, cpu(), source, Random(seed))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("drafted", [0, 3])
def test_no_block_is_lost_or_made(caching: bool, drafted: int) -> None:
    launch = replace(SMALL, enable_prefix_caching=caching, num_speculative_tokens=drafted)
    engine = small(3, 30, launch)
    for turn in range(1, 60):
        engine.run(2.0 * turn)
        scheduler = engine.scheduler
        held = engine.held_blocks()
        assert scheduler.blocks.free + held == pytest.approx(scheduler.blocks.usable)
        assert len(scheduler.running) + len(scheduler.waiting) <= 30
    assert engine.counters.counts["num_preemptions_total"] > 50


def test_an_empty_engine_holds_nothing() -> None:
    engine = small(4, 12)
    engine.run(30.0)
    assert isinstance(engine.source, Closed)
    engine.source.resize(0, engine.now_s)
    engine.run(300.0)
    assert engine.scheduler.blocks.usage_ratio == pytest.approx(0.0, abs=1e-9)
    histograms = engine.counters.histograms
    answered = sum(histograms["e2e_request_latency_seconds"].own)
    assert answered == sum(histograms["time_to_first_token_seconds"].own)
    tokens = histograms["request_generation_tokens"].sum
    assert engine.counters.counts["generation_tokens_total"] == pytest.approx(tokens, rel=1e-3)


def test_the_oldest_chain_is_evicted_from_its_tail() -> None:
    blocks = Blocks(101, 16)
    old, new = Chain(60.0, refs=1), Chain(30.0, refs=1)
    assert blocks.take(90)
    blocks.release(old)
    blocks.release(new)
    assert blocks.free == 100
    assert blocks.take(50)
    assert (old.blocks, new.blocks, blocks.evicted) == (20.0, 30.0, 40.0)
    assert not blocks.take(60)


@pytest.mark.parametrize("form", VERSIONS)
def test_pages_of_every_version_say_the_same(form: str) -> None:
    engine = small(5, 20)
    writer = PageWriter(engine, model="served", form=form)
    stream = TargetStream("sim", Profile(window_s=15.0), Limits())
    engine.run(5.0)
    for turn in range(1, 9):
        stream.take(START_S + 5.0 * turn, writer.page(), "text/plain")
        engine.run(5.0 * (turn + 1))
    body = writer.page()
    (said,) = stream.take(START_S + 45.0, body, "text/plain")
    assert said.model == "served"
    counts, scheduler = engine.counters.counts, engine.scheduler
    assert said.values["running"] == len(scheduler.running)
    assert said.values["kv_usage_ratio"] == pytest.approx(scheduler.blocks.usage_ratio)
    assert said.values["kv_capacity_tokens"] is not None
    assert values_of(body)["num_preemptions_total"] == int(counts["num_preemptions_total"]) > 0
    itl = engine.counters.histograms["inter_token_latency_seconds"]
    assert said.values["itl_p50_s"] is not None
    assert sum(itl.own) > 0


def test_a_capture_of_it_is_read() -> None:
    case = next(cases())
    entry = Server(case.setting(), Random(1)).scrape(5.0)
    read = entry_of(line_of(entry).rstrip(b"\n"))
    assert read == entry


def planted(case: Case, seed: int) -> tuple[float, float]:
    """How many waited, and how many were preempted a minute, in a case's second half."""
    server = Server(case.setting(), Random(seed))
    server.engine.run(300.0)
    for fault in case.faults:
        fault.begin(server)
    server.engine.run(300.0 + LASTS_S / 2)
    before = server.engine.counters.counts["num_preemptions_total"]
    server.engine.run(300.0 + LASTS_S)
    preempted = server.engine.counters.counts["num_preemptions_total"] - before
    return len(server.engine.scheduler.waiting), preempted / (LASTS_S / 120)


QUEUED = frozenset({"queue_saturation", "admission_limit", "adapter_thrash"})


@pytest.mark.parametrize(
    "case",
    [c for c in cases() if c.group == "one fault" and c.machine == "8B on H100"],
    ids=lambda case: case.name,
)
def test_a_planted_fault_takes(case: Case) -> None:
    waiting, preempted_per_min = planted(case, 1)
    cause = case.faults[0].cause
    if cause == "kv_pressure":
        assert preempted_per_min > 10
    elif cause in QUEUED:
        assert waiting > 20
        assert preempted_per_min == 0
    elif cause not in ("engine_stalled", "gpu_fault", "gpu_throttled", "target_down"):
        assert preempted_per_min == 0
        assert waiting < 10
