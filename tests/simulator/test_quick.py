"""The quick engine against the one that goes step by step, and its pages against their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from statistics import median

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.diagnose.diagnosis_config import Profile
from tests.simulator.days import KINDS, setting_of
from tests.simulator.page import START_S, PageWriter
from tests.simulator.quick import QuickEngine
from tests.simulator.quick_pages import QuickPages
from tests.simulator.server import Server, Setting
from tests.simulator.shown import Shown
from tests.simulator.traces import parts, traces

MACHINE = "32B on H200"
SCRAPE_S, SCRAPES, SETTLED = 15.0, 80, 10
RATIOS = {
    "running_avg": 0.15,
    "kv_usage_avg_ratio": 0.15,
    "completed_per_s": 0.1,
    "generation_tokens_per_s": 0.1,
    "prefix_hit_ratio": 0.02,
    "ttft_p50_s": 0.15,
    "ttft_mean_s": 0.15,
    "itl_mean_s": 0.1,
    "e2e_mean_s": 0.15,
    "spec_acceptance_ratio": 0.05,
}
"""Of each signal how far the medians over a quarter of an hour may be apart."""


def values(engine: Shown, run: Callable[[float], None], form: str) -> Iterator[dict[str, float]]:
    """The signals of an engine's scrapes, once it is settled."""
    stream = TargetStream("sim", Profile(), Limits())
    writer = PageWriter(engine, model="served", form=form)
    for turn in range(1, SCRAPES + 1):
        run(SCRAPE_S * turn)
        entry = Entry(START_S + SCRAPE_S * turn, writer.page(), status=200)
        for diagnosis in stream.replay(entry):
            if turn > SETTLED:
                yield {key: value for key, value in diagnosis.values.items() if value is not None}


def quick_of(setting: Setting, seed: int) -> QuickEngine:
    """The quick engine of a setting, under its usual load."""
    server = Server(setting, Random(seed))
    usual = server.rate_per_s
    return QuickEngine(
        setting.launch, server.steps, server.source.kind, lambda _now_s: usual, server.rng
    )


@pytest.mark.parametrize("kind", ["chat", "speculation"])
def test_it_says_what_the_detailed_engine_says(kind: str) -> None:
    setting = setting_of(dict(KINDS)[kind], MACHINE)
    quick, server = quick_of(setting, 2), Server(setting, Random(1))
    ours = list(values(quick, quick.run, setting.form))
    theirs = list(values(server.engine, server.engine.run, setting.form))
    for key, most in RATIOS.items():
        simulated, wanted = (median(row.get(key, 0.0) for row in rows) for rows in (ours, theirs))
        assert simulated == pytest.approx(wanted, rel=most), key
    assert not quick.overfull


def test_nothing_is_lost() -> None:
    engine = quick_of(setting_of(dict(KINDS)["chat"], MACHINE), 3)
    engine.run(600.0)
    counts, histograms = engine.counters.counts, engine.counters.histograms
    started = sum(histograms["time_to_first_token_seconds"].own)
    ended = sum(histograms["e2e_request_latency_seconds"].own)
    assert started == ended + len(engine.scheduler.running)
    assert counts["prompt_tokens_cached_total"] == engine.scheduler.hit_tokens
    generated = histograms["request_generation_tokens"].sum
    assert (
        0 <= counts["generation_tokens_total"] - generated <= 2000 * len(engine.scheduler.running)
    )


def test_a_cache_that_is_too_small_is_told() -> None:
    setting = setting_of(dict(KINDS)["chat"], MACHINE)
    setting.launch.num_gpu_blocks = 200
    engine = quick_of(setting, 3)
    engine.run(120.0)
    assert engine.overfull


@pytest.mark.parametrize("kind", ["chat", "adapters"])
def test_its_pages_are_what_their_text_says(kind: str) -> None:
    setting = setting_of(dict(KINDS)[kind], MACHINE)
    engine = quick_of(setting, 4)
    pages = QuickPages(engine, form=setting.form)
    engine.run(60.0)
    page = pages.page()
    text = PageWriter(engine, model="served", form=setting.form).page()
    read = PageParser(Limits()).parse(text)
    assert [series.name for series in page.layout.series] == [
        series.name for series in read.layout.series
    ]
    assert page.values == read.values


def test_the_same_stretch_is_judged_alike_whoever_counts_it() -> None:
    given = [replace(part, lasts_s=300.0) for part in parts(1, 0.3)]
    assert len({(part.kind, part.machine) for part in given}) == 4
    watched_traces = list(traces(given))
    assert [trace.name for trace in watched_traces] == [
        f"{part.kind} on {part.machine}" for part in given
    ]
    assert all(trace.busy_ratio > 0.3 for trace in watched_traces)
    assert list(traces(given)) == watched_traces
