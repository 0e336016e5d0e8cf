"""One Prometheus with several kinds of engines: each is judged by its own kind, none averaged."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kneewatch.agent.fleet.queries import QueryScope, running_requests
from kneewatch.collector.exposition import parse
from kneewatch.collector.page import Page
from kneewatch.collector.signals.promql import Dialect, promql
from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from tests.agent.fleet.prometheus_fleet import watched
from tests.collector.oracle import Prometheus, Target, running
from tests.collector.oracle_targets import captured
from tests.programs import require

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDING = captured("sticky_two_replicas.r0")
SCRAPES = RECORDING.scrapes[20:36]
AT_S = SCRAPES[-1][0] / 1000 + 0.1
WINDOW_S = 30.0

GROWING: Mapping[str, float] = {
    "realtime_tokens_total": 300,
    "prefill_effective_tokens_total": 200,
    "prompt_tokens_histogram_count": 2,
    "prompt_tokens_histogram_sum": 900,
    "prompt_tokens_histogram_bucket": 2,
    "n_decode_total": 9,
}
"""How much counters of the stored pages grow at each scrape."""


def page_at(body: str, at: int, values: Mapping[str, float]) -> Page:
    """The page at the scrape of this number, with other values of gauges."""
    page = parse(body)
    now: list[float] = []
    for (name, _), value in zip(page.layout.series, page.values, strict=True):
        own = re.sub(r"^(sglang|llamacpp):", "", name)
        growth = values.get(f"{own}_growth", GROWING.get(own, 0))
        now.append(values.get(own, value) + growth * at)
    return Page(page.layout, now)


def target(name: str, page: str, until: float = len(SCRAPES), **values: float) -> Target:
    """A server that shows a stored page, with other values, at the first scrapes; then it is
    gone."""
    body = gzip.decompress((FIXTURES / f"{page}.txt.gz").read_bytes()).decode()
    return Target(name, [
        (t_ms, page_at(body, at, values) if at < until else None)
        for at, (t_ms, _) in enumerate(SCRAPES)
    ])  # fmt: skip


SGLANG = "pages/sglang-0.5.23-rendered"


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    full = {"num_running_reqs": 40.0, "num_queue_reqs": 30.0, "kv_used_tokens": 99_000.0}
    with running(require("prometheus")) as server:
        server.load([
            Target(RECORDING.instance, SCRAPES),
            target("sglang-full", SGLANG, num_retracted_requests_total_growth=40, **full),
            target("sglang-idle", SGLANG, num_running_reqs=1, kv_used_tokens=1_000),
            target("sglang-gone", SGLANG, 4, num_running_reqs=1),
            target("llama", "engines/llamacpp-metrics-loaded"),
            target("dynamo", "engines/dynamo-worker-metrics-loaded"),
        ])  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def fleet(prometheus: Prometheus) -> FleetVerdict:
    return watched(prometheus, at_s=AT_S, window_s=WINDOW_S)


def test_each_replica_is_judged_by_its_own_kind(fleet: FleetVerdict) -> None:
    assert {engine.replica: (engine.tier, *engine.causes) for engine in fleet.engines} == {
        RECORDING.instance: (None,),
        "sglang-full": ("SGLang", "kv_pressure"),
        "sglang-idle": ("SGLang",),
        "llama": ("llama.cpp",),
        # Its page stands still.
        "dynamo": (None, "engine_stalled"),
    }
    worst = next(cause for cause in fleet.causes if cause.id == "kv_pressure")
    assert "--mem-fraction-static" in worst.lever
    assert "vLLM" not in worst.summary
    assert not fleet.failed
    assert not fleet.warnings


def test_kinds_are_never_averaged_with_each_other(fleet: FleetVerdict) -> None:
    tiers = {(tier.pool, tier.tier): tier.replicas for tier in fleet.tiers}
    assert tiers == {("tiny", None): 2, ("tiny", "SGLang"): 2, ("", "llama.cpp"): 1}


def test_the_last_hour_is_known_of_every_kind(fleet: FleetVerdict) -> None:
    hours = {engine.replica: engine.values for engine in fleet.engines}
    assert hours["sglang-full"]["running_hour_avg"] == 40
    assert hours["llama"]["running_hour_avg"] == 2
    assert hours["sglang-full"]["prompt_tokens_mean"] == pytest.approx(450, rel=0.05)


@pytest.mark.parametrize("key", ["itl_stall_per_s", "prefill_long_per_s", "prefill_pass_per_s"])
def test_bounds_and_labels_of_sglang_are_those_of_its_page(
    prometheus: Prometheus, key: str
) -> None:
    (signal,) = (each for each in VLLM_SIGNALS if each.key == key)
    selector = 'instance="sglang-full"'
    query = promql(signal.expr, Dialect(range_s=WINDOW_S, selector=selector, prefix="sglang:"))
    assert query is not None
    assert [row.value for row in prometheus.ask(query, SCRAPES[-1][0])] == [0.0]


def test_replicas_that_vanished_are_missed_while_only_another_kind_serves(
    prometheus: Prometheus,
) -> None:
    named = f'instance=~"sglang-gone|{RECORDING.instance}"'
    verdict = watched(prometheus, at_s=AT_S, window_s=WINDOW_S, selector=named)
    assert [(gone.replica, gone.pool) for gone in verdict.gone] == [("sglang-gone", "tiny")]


def test_ranks_count_once_and_data_parallel_engines_are_apart(prometheus: Prometheus) -> None:
    body = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",model_name="m",tp_rank="{tp}"}} {5 + dp}\n'
        f'sglang:num_queue_reqs{{dp_rank="{dp}",model_name="m",tp_rank="{tp}"}} 0\n'
        for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
    )
    prometheus.load([Target("sglang-dp", [(t_ms, parse(body)) for t_ms, _ in SCRAPES])])
    verdict = watched(prometheus, at_s=AT_S, window_s=WINDOW_S, selector='instance="sglang-dp"')
    values = {engine.engine: engine.values for engine in verdict.engines}
    assert {name: row["running"] for name, row in values.items()} == {"0": 5, "1": 6}
    assert {name: row["running_hour_avg"] for name, row in values.items()} == {"0": 5, "1": 6}
    scope = QueryScope('instance="sglang-dp"', WINDOW_S, ("instance",))
    (load,) = prometheus.ask(running_requests(scope, ["model_name"]), SCRAPES[-1][0])
    assert load.value == 11
