"""Replicas by a week in a real Prometheus: the peak is found, the saving is in money."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kneewatch.collector.page import Layout, Page, Series
from tests.agent.fleet.prometheus_fleet import observed, watched
from tests.agent.running import Main
from tests.collector.oracle import LOOPBACK, Prometheus, Target, running
from tests.diagnose.workloads import PROFILE
from tests.programs import require

END_S = 1_795_000_000
DAY_S, WEEK_S = 86_400, 604_800
BEGIN_S = END_S - WEEK_S - 3600
SHORT_NOW = 0.4
"""The share of short prompts in the last hour; before it was 0.9."""

REPLICAS = 4
PEAK = 30.0
"""Requests in flight on each replica at the best hour; in the night there are none."""

NAMES = (("engine", "0"), ("job", "vllm"), ("model_name", "meta-llama/Llama-3.1-8B-Instruct"))
CONFIG = (("block_size", "16"), ("engine", "0"), ("job", "vllm"), ("num_gpu_blocks", "27000"))
PER_S = {
    "time_to_first_token_seconds_sum": 0.05,
    "time_to_first_token_seconds_count": 1.0,
    "request_prompt_tokens_sum": 1000.0,
    "request_prompt_tokens_count": 1.0,
    "request_generation_tokens_sum": 300.0,
    "request_generation_tokens_count": 1.0,
    "inter_token_latency_seconds_sum": 3.0,
    "inter_token_latency_seconds_count": 300.0,
    "generation_tokens_total": 300.0,
    "prompt_tokens_total": 1000.0,
    "num_preemptions_total": 0.0,
    "prefix_cache_queries_total": 1000.0,
    "prefix_cache_hits_total": 640.0,
    "request_success_total": 1.0,
}
LABELS = {"request_success_total": tuple(sorted((*NAMES, ("finished_reason", "stop"))))}


def series() -> tuple[Series, ...]:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    own = [Series(f"vllm:{name}", LABELS.get(name, NAMES)) for name in (*gauges, *PER_S)]
    buckets = [Series("vllm:request_prompt_tokens_bucket", tuple(sorted((*NAMES, ("le", le)))))
               for le in ("1000.0", "+Inf")]  # fmt: skip
    return (
        *own,
        *buckets,
        Series("vllm:cache_config_info", CONFIG),
        Series("up", (("job", "vllm"),)),
    )


def target(name: str, times: Sequence[int]) -> Target:
    layout = Layout(series(), {})

    def page(t_s: int) -> Page:
        load = PEAK * max(0.0, math.sin(2 * math.pi * ((t_s - END_S) / DAY_S + 0.1)))
        held = load * 1200 / (27_000 * 16)
        counters = [per_s * (t_s - BEGIN_S) for per_s in PER_S.values()]
        short = 0.9 * (t_s - BEGIN_S) - (0.9 - SHORT_NOW) * max(0, t_s - (END_S - 3600))
        return Page(layout, [load, 0.0, held, *counters, short, t_s - BEGIN_S, 1.0, 1.0])

    return Target(f"{name}:8000", [(1000 * t_s, page(t_s)) for t_s in times])


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """Two models' weeks would say no more: one tier, of which only the last hour is dense."""
    times = [*range(BEGIN_S, END_S - 3600, 300), *range(END_S - 3600, END_S + 1, 15)]
    with running(require("prometheus")) as server:
        server.load([target(f"r{at}", times) for at in range(REPLICAS)])
        yield server


def sized(main: Main, prometheus: Prometheus, *more: object) -> dict[str, Any]:
    url = f"http://{LOOPBACK}:{prometheus.port}"
    ended = main("diagnose", "--prometheus", url, "--at", END_S, "--format", "json",
                 "--fleet-queries-per-s", "1000", *more)  # fmt: skip
    assert ended.documents, ended.err
    document = ended.documents[0]
    (tier,) = document["tiers"]
    parts = {key: document[key] for key in ("recommendations", "causes")}
    return {**tier["size"], **parts}


KNOWN = ("--gpu", "h100-sxm", "--tensor-parallel", "1")


def test_the_weeks_peak_and_the_saving(main: Main, prometheus: Prometheus) -> None:
    size = sized(main, prometheus, *KNOWN)
    peak = size["peak"]
    assert peak["requests"] == pytest.approx(REPLICAS * PEAK, rel=1e-3)
    assert (peak["t"] - END_S) % DAY_S == pytest.approx(0.15 * DAY_S, abs=600)
    assert peak["seen_ratio"] > 0.99
    assert (size["replicas"], size["recommended"]) == (REPLICAS, 2)
    (recommendation,) = size["recommendations"]
    assert recommendation["id"] == "fewer-replicas"
    assert recommendation["cost_usd_per_hour"] == pytest.approx(-2 * 3.0)
    assert size["usd_per_hour"] == pytest.approx(4 * 3.0)


def test_prompts_that_grew_within_the_week_are_told(main: Main, prometheus: Prometheus) -> None:
    (cause,) = [
        cause for cause in sized(main, prometheus)["causes"] if cause["id"] == "workload_drift"
    ]
    (evidence,) = cause["evidence"]
    assert evidence["signal"] == "prompt_tokens_mean"
    assert evidence["value"] == pytest.approx(0.9 - SHORT_NOW, abs=0.01)
    assert "above 1000 tokens" in evidence["text"]
    assert cause["severity"] == "info"


def test_the_usual_hit_ratio_is_that_of_past_hours(prometheus: Prometheus) -> None:
    (usual,) = observed(prometheus, at_s=END_S).past.usual.values()
    assert usual.hit_ratio == pytest.approx(0.64, abs=0.001)
    assert usual.query_per_s == pytest.approx(REPLICAS * 1000.0, rel=0.01)
    assert usual.ttft_p50_s is None, "no buckets"
    quiet = {
        engine.values["prefix_hit_quiet_ratio"]
        for engine in watched(prometheus, at_s=END_S).engines
    }
    assert quiet == {usual.hit_ratio}


def test_a_stated_profile_is_looked_at_beside_the_week(
    main: Main, prometheus: Prometheus, tmp_path: Path
) -> None:
    """Four replicas finish one request a second each; 2.5 a second were planned for."""
    (tmp_path / "p.toml").write_text(
        PROFILE.replace("p50_tokens = 1000", "p50_tokens = 500")
        .replace("p95_tokens = 4000", "p95_tokens = 1000")
        .replace("requests_per_s = 8", "requests_per_s = 2")
    )
    causes = sized(main, prometheus, "--workload-profile", "p.toml")["causes"]
    (cause,) = [row for row in causes if row["id"] == "workload_drift"]
    assert "a week ago. Against the profile p.toml: prompts are longer" in cause["summary"]
    assert "arrivals are 1.6x its peak" in cause["summary"]
    shifts = {text["signal"]: text["value"] for text in cause["evidence"]}
    assert shifts["prompt_tokens_shift_ratio"] == pytest.approx(0.95 - SHORT_NOW, abs=0.01)
    assert shifts["arrival_peak_ratio"] == pytest.approx(4 / 2.5, rel=0.01)
    wrong = main("diagnose", "--prometheus", "http://127.0.0.1:1", "--workload-profile", "q.toml")
    assert wrong.status == 2
    assert "q.toml does not exist" in wrong.err


def test_the_stated_price_counts(main: Main, prometheus: Prometheus) -> None:
    size = sized(main, prometheus, *KNOWN, "--usd-per-gpu-hour", "1.5")
    (recommendation,) = size["recommendations"]
    assert recommendation["cost_usd_per_hour"] == pytest.approx(-3.0)


def test_a_day_is_no_week(main: Main, prometheus: Prometheus) -> None:
    size = sized(main, prometheus, *KNOWN, "--fleet-lookback", "1d")
    assert size["recommended"] == REPLICAS
    assert "a week's peak" in str(size["why"])


def test_a_tight_itl_target_keeps_them(main: Main, prometheus: Prometheus) -> None:
    size = sized(main, prometheus, *KNOWN, "--slo-itl", "10.5ms")
    assert size["recommended"] == REPLICAS
    assert "ITL" in str(size["why"])
