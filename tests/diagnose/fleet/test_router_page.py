"""A router's page as a target: what it shows without its engines."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kneewatch.agent.stream import target_monitor
from kneewatch.collector.exposition import parse
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import decode, encode

ENGINES = Path(__file__).parents[2] / "fixtures" / "engines"
W0, W1 = (f'{{worker="http://127.0.0.1:1808{at}"}}' for at in (0, 1))
SUCCESS = W1.replace("}", ',outcome="success"}')
EPP = """llm_d_epp_ready_endpoints{name="pool"} 2
llm_d_epp_flow_control_queue_size{inference_pool="pool"} 0
llm_d_epp_flow_control_stale_endpoints{detector="utilization"} 0
llm_d_epp_flow_control_pool_saturation{stage="prefill"} 0.4
llm_d_epp_flow_control_requests_total{outcome="Dispatched"} 100
llm_d_epp_flow_control_requests_total{outcome="RejectedCapacity"} 0
llm_d_epp_scheduler_e2e_duration_seconds_sum 1
llm_d_epp_scheduler_e2e_duration_seconds_count 100
"""
STACK = """vllm:healthy_pods_total{server="http://a:8000"} 1
vllm:healthy_pods_total{server="http://b:8000"} 1
vllm:current_qps{server="http://a:8000"} 1
vllm:current_qps{server="http://b:8000"} 1
vllm:num_requests_running{server="http://a:8000"} 3
"""


def page_of(name: str) -> str:
    """A stored page, or the lines of one."""
    if "\n" in name:
        return name
    return gzip.decompress((ENGINES / f"{name}-metrics.txt.gz").read_bytes()).decode()


def changed(body: str, values: Mapping[str, float]) -> str:
    """The page with other values of series; those that it lacks are added."""
    lines = [line for line in body.splitlines() if line.rpartition(" ")[0] not in values]
    return "\n".join([*lines, *(f"{name} {value}" for name, value in values.items()), ""])


def judged(
    name: str,
    values: Mapping[str, float],
    growing: Mapping[str, float],
    profile: Profile | None = None,
    scrapes: Sequence[float] = range(0, 421, 30),
) -> Verdict:
    """The verdict after pages over five minutes. Series of `growing` rise by so much a scrape."""
    monitor, verdict = target_monitor("r", profile or Profile()), None
    body = page_of(name)
    for at, t_s in enumerate(scrapes):
        grown = {series: 1e6 + at * step for series, step in growing.items()}
        (verdict,) = monitor.page(1000.0 + t_s, parse(changed(body, {**values, **grown})))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("vllm-router", "vllm-router"),
        ("sglang-router", "sglang-router"),
        ("dynamo-frontend", "Dynamo's front end"),
        (EPP, "llm-d endpoint picker"),
        (STACK, "vLLM production-stack router"),
    ],
)
def test_a_quiet_router_is_ok_and_no_engine(name: str, program: str) -> None:
    verdict = judged(name, {}, {})
    assert (verdict.program, verdict.health, list(verdict.causes)) == (program, "ok", [])
    assert verdict.was_read
    assert verdict.values["running"] is not None or name == EPP
    assert any("engines have room" in line for line in verdict.unknown)
    assert decode(encode(verdict)).program == program


def ladder(best: float, selected: float, reused: float) -> Mapping[str, float]:
    """Dynamo's counters of reuse of a model."""
    names = {"best_eligible_cached_prefix": best, "selected_cached_prefix": selected,
             "worker_reused": reused}  # fmt: skip
    return {
        f'dynamo_component_router_kv_{name}_tokens_total{{model="tiny"}}': tokens
        for name, tokens in names.items()
    }


def test_reuse_that_workers_do_not_count_is_unknown() -> None:
    total = {'dynamo_frontend_input_sequence_tokens_sum{model="tiny"}': 10_000.0}
    assert judged("dynamo-frontend", {}, {**total, **ladder(7000, 6900, 0)}).causes == []
    (cause,) = judged("dynamo-frontend", {}, {**total, **ladder(7000, 2000, 0)}).causes
    assert "how many were reused is unknown" in cause.summary
    assert "--router-kv-overlap-score-credit" in cause.lever


@pytest.mark.parametrize(
    ("name", "values", "growing", "severity", "says", "lever"),
    [
        pytest.param("vllm-router", {f"vllm_router_cb_state{W1}": 1}, {}, "warning",
                     "127.0.0.1:18081 nothing for 60 s: its circuit breaker",
                     "--cb-failure-threshold", id="breaker open"),
        pytest.param("sglang-router", {f"smg_worker_health{W0}": 0, f"smg_worker_health{W1}": 0},
                     {}, "critical", "no ready endpoint", "readiness", id="no worker is up"),
        pytest.param("vllm-router",
                     {f"vllm_router_worker_health{W0}": 0, f"vllm_router_worker_health{W1}": 0},
                     {}, "critical", "fails the router's health check", "--health-check",
                     id="no worker passes"),
        pytest.param("sglang-router", {f"smg_worker_health{W0}": 0}, {}, "warning",
                     "fails the router's health check", "--health-check", id="a worker is down"),
        pytest.param("vllm-router", {"vllm_router_active_workers": 0}, {}, "critical",
                     "no ready endpoint", "discovery", id="no worker"),
        pytest.param("vllm-router", {}, {f"vllm_router_policy_decisions_total{W1}": 10}, "info",
                     "picks http://127.0.0.1:18081 100.0x", "scorers", id="one gets all"),
        pytest.param(STACK, {'vllm:current_qps{server="http://b:8000"}': 9}, {}, "info",
                     "picks http://b:8000 9.0x", "scorers", id="one gets all, as a rate"),
        pytest.param(EPP, {}, {"llm_d_epp_datalayer_poll_errors_total": 2}, "warning",
                     "in each of the last 5 minutes", "TLS", id="its reads of metrics fail"),
        pytest.param("vllm-router", {}, {"vllm_router_retries_exhausted_total": 1}, "warning",
                     "rejected 10 requests within 5 min", "--queue-size", id="retries exhausted"),
        pytest.param(
            "dynamo-frontend",
            {'dynamo_frontend_router_queue_pending_requests{model="tiny",policy_class="default",'
             'worker_type="decode"}': 9}, {}, "warning", "holds 9 requests",
            "prefill_busy_threshold_frac", id="a queue in the router"),
        pytest.param(
            EPP, {'llm_d_epp_flow_control_stale_endpoints{detector="utilization"}': 2,
                  'llm_d_epp_flow_control_pool_saturation{stage="prefill"}': 1}, {}, "warning",
            "saturation is exactly 1.0", "metricsStalenessThreshold", id="stale backpressure"),
        pytest.param(EPP, {}, {'llm_d_epp_flow_control_requests_total{outcome="EvictedTTL"}': 1},
                     "warning", "rejected 10 requests", "TTL", id="evicted in the router"),
        pytest.param(EPP, {}, {"llm_d_epp_scheduler_e2e_duration_seconds_sum": 3,
                               "llm_d_epp_scheduler_e2e_duration_seconds_count": 10}, "warning",
                     "itself is slow: llm_d_epp_scheduler_e2e_duration_seconds has a mean of",
                     "plugin", id="its own steps are slow"),
        pytest.param(
            "dynamo-frontend", {},
            {'dynamo_frontend_input_sequence_tokens_sum{model="tiny"}': 10_000,
             'dynamo_frontend_input_sequence_tokens_sum{model="another"}': 90_000,
             **ladder(7000, 2000, 1500)},
            "warning", "70% of the prompt tokens of tiny were cached on the best worker, 20% on",
            "--router-kv-overlap-score-credit", id="reuse lost by routing"),
    ],
)  # fmt: skip
def test_a_fault_of_a_router_is_told_from_its_page_with_its_setting(
    name: str,
    values: Mapping[str, float],
    growing: Mapping[str, float],
    severity: str,
    says: str,
    lever: str,
) -> None:
    (cause,) = judged(name, values, growing).causes
    assert (cause.id, cause.severity.word) == ("router_fault", severity)
    assert says in cause.summary
    assert lever in cause.lever


@pytest.mark.parametrize(
    ("name", "values", "growing"),
    [
        pytest.param(EPP, {'llm_d_epp_flow_control_pool_saturation{stage="prefill"}': 1}, {},
                     id="saturated without stale endpoints"),
        pytest.param(EPP, {'llm_d_epp_flow_control_requests_total{outcome="Dispatched"}': 9e9}, {},
                     id="requests are dispatched"),
        pytest.param("vllm-router", {}, {f"vllm_router_policy_decisions_total{W0}": 4,
                                         f"vllm_router_policy_decisions_total{W1}": 6},
                     id="both workers are picked"),
        pytest.param("sglang-router", {},
                     {f"smg_worker_cb_outcomes_total{SUCCESS}": 0.1}, id="few picks"),
        pytest.param("sglang-router", {}, {'smg_http_rate_limit_total{decision="allowed"}': 9},
                     id="requests are admitted"),
        pytest.param(EPP, {"llm_d_epp_datalayer_poll_errors_total": 9}, {}, id="old errors"),
    ],
)  # fmt: skip
def test_what_is_nearly_a_fault_is_none(
    name: str, values: Mapping[str, float], growing: Mapping[str, float]
) -> None:
    assert not judged(name, values, growing).causes


def test_a_short_watch_says_how_long_it_watched() -> None:
    short = Profile(window_s=20.0)
    open_breaker = {f"vllm_router_cb_state{W1}": 1.0}
    assert not judged("vllm-router", open_breaker, {}, short, range(0, 15, 5)).causes
    (cause,) = judged("vllm-router", open_breaker, {}, short, range(0, 21, 5)).causes
    assert "nothing for 20 s" in cause.summary


def test_a_router_that_is_gone_is_down_and_comes_back() -> None:
    monitor = target_monitor("r", Profile())
    body = page_of("vllm-router")
    assert monitor.page(1000.0, parse(body))[0].health == "ok"
    gone = [monitor.page(1000.0 + t_s, parse("up 1\n")) for t_s in range(10, 91, 20)]
    assert gone[-1][0].health == "critical"
    (back,) = monitor.page(1100.0, parse(body))
    assert (back.health, monitor.last_error) == ("ok", None)


def beside(waiting: float, *workers: int) -> list[tuple[Mapping[str, str], Verdict]]:
    """Engines at the addresses of these workers, each with a queue."""
    values = {"running": 4.0, "waiting": waiting, "kv_usage_ratio": 0.2, "arrival_per_s": 1.0}
    return [
        (
            {"instance": f"127.0.0.1:1808{at}"},
            Verdict(t_s=1e3, target=f"w{at}", health="ok", values=values, judged_against=""),
        )
        for at in workers
    ]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            beside(0.0, 0, 1),
            "sent w1 nothing for 60 s: its circuit breaker is open, while the engine",
        ),
        (beside(0.0, 1), "sent http://127.0.0.1:18081 nothing"),
    ],
    ids=["all workers are targets", "one worker is none"],
)
def test_a_router_is_judged_beside_its_engines_if_all_are_targets(
    others: list[tuple[Mapping[str, str], Verdict]], says: str
) -> None:
    monitor = target_monitor("r", Profile(), beside=lambda: others)
    body = changed(page_of("vllm-router"), {f"vllm_router_cb_state{W1}": 1})
    (verdict,) = [monitor.page(1000.0 + t_s, parse(body))[0] for t_s in range(0, 121, 30)][-1:]
    assert says in verdict.causes[0].summary
    assert any("engines have room" in line for line in verdict.unknown) == (len(others) < 2)


def test_a_router_that_rejects_while_its_engines_are_full_is_not_blamed() -> None:
    monitor = target_monitor("r", Profile(), beside=lambda: beside(9.0, 0, 1))
    body = page_of("vllm-router")
    rejected = ({"vllm_router_retries_exhausted_total": 1e6 + at} for at in range(14))
    pages = [parse(changed(body, values)) for values in rejected]
    assert not any(monitor.page(1000.0 + 30 * at, each)[0].causes for at, each in enumerate(pages))
