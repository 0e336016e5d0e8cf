"""Causes across replicas: what must be concluded, and what only looks like it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.deployment.server_state import GpuState, XidSeen
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import folded
from kneewatch.diagnose.fleet.inventory import Gone, Group, Usual, Why, usual_of
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.values import Histogram
from kneewatch.diagnose.verdict import Cause
from kneewatch.reports.fleet_rendering import spread_words
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import WARNING, Severity
from tests.diagnose.fleet.example_fleets import DILUTED, Row, causes, fleet, pod, verdict

HOT = {"running": 40.0, "running_avg": 40.0, "waiting": 10.0, "arrival_per_s": 9.0}
SLOW = {"itl_p50_s": 0.06, "itl_p99_s": 0.2}


def test_a_fleet_without_trouble() -> None:
    diagnosis = verdict(*fleet(6))
    assert causes(diagnosis) == {}
    assert diagnosis.health == "ok"


def test_one_hot_replica_is_seen_whatever_the_mean() -> None:
    diagnosis = verdict(*fleet(40), (pod("hot"), HOT))
    assert causes(diagnosis) == {"replica_imbalance": ("hot",)}
    (tier,) = diagnosis.tiers
    running = tier.signals["running"]
    assert spread_words("running", running).startswith("running: highest 40 (hot), 8 to 40, ")
    assert (running.worst, running.most, running.count) == ("hot", 40.0, 41)
    assert (running.mean or 0.0) < 9


@pytest.mark.parametrize(
    ("values_s", "words"),
    [
        pytest.param((0.049, 0.049), "49 ms on all 2", id="all alike"),
        pytest.param((0.0488, 0.0491), "49 ms on all 2", id="alike as they are shown"),
        pytest.param((0.049, 0.049, nan), "49 ms on 2, 1 unknown", id="of those known"),
        pytest.param((0.049,), "49 ms on r0", id="of the only one"),
        pytest.param((0.04, 0.06), "highest 60 ms (r1), 40 ms to 60 ms, median 60 ms over 2",
                     id="apart"),
    ],
)  # fmt: skip
def test_a_signal_over_the_engines_in_words(values_s: tuple[float, ...], words: str) -> None:
    rows: list[Row] = [
        (pod(f"r{at}"), {"itl_p99_s": value_s}) for at, value_s in enumerate(values_s)
    ]
    (tier,) = verdict(*rows).tiers
    assert spread_words("itl_p99_s", tier.signals["itl_p99_s"]) == f"itl_p99_s: {words}"


def test_a_queue_is_reported_under_the_loss_of_replicas_before_it() -> None:
    loss = FleetCause(
        id="target_down", confidence=0.95, severity=Severity.CRITICAL, summary="", since_s=100.0
    )
    later = replace(loss, id="admission_limit", severity=WARNING, since_s=130.0, tier="H100")
    before, other = replace(later, since_s=50.0), replace(later, pool="q")
    (head,) = folded([loss, later])
    assert (head.id, head.explains) == ("target_down", ("admission_limit",))
    assert folded([loss, before]) == [loss, before]
    assert folded([loss, other]) == [loss, other]
    mild = replace(loss, severity=WARNING)
    assert folded([mild, later]) == [mild, later]


def test_slow_steps_of_a_pods_two_engines_are_reported_under_their_bad_node() -> None:
    engines = ("a engine 0", "a engine 1")
    steps = FleetCause(
        id="slow_steps", confidence=0.9, severity=WARNING, summary="", tier="H100", replicas=engines
    )
    bad = [replace(steps, id="bad_node", replicas=(name,)) for name in engines]
    assert {cause.id for cause in folded([steps, *bad])} == {"bad_node"}
    assert len(folded([steps, bad[0]])) == 2, "the other engine is slow too"


def test_a_router_that_sends_all_to_a_pod_of_two_engines() -> None:
    hot: list[Row] = [(pod("hot", engine=str(at)), HOT) for at in range(2)]
    none = {"running": 0.0, "running_avg": 0.0, "arrival_per_s": 0.0, "kv_usage_avg_ratio": 0.0}
    others: list[Row] = [(pod(name, engine=str(at)), none) for name in "abc" for at in range(2)]
    diagnosis = verdict(*hot, *others)
    (cause,) = (each for each in diagnosis.causes if each.id == "replica_imbalance")
    assert cause.severity == Severity.CRITICAL
    assert "the router sends it 100% of the requests" in cause.summary


def test_decode_replicas_without_a_role_label_lose_no_prefixes() -> None:
    received = {"prefix_hit_ratio": 0.0, "computed_prompt_tokens_per_s": 0.0, "ttft_p50_s": 0.4}
    slow: list[Row] = [(pod(f"decode-{at}"), received) for at in range(3)]
    rows = [*fleet(2), *slow]
    usual = {("prod/m", "", ""): Usual(0.9, 15_000.0, 0.1)}
    assert "routing_dilution" not in causes(verdict(*rows, usual=usual))
    computed = [(labels, {**own, "computed_prompt_tokens_per_s": 3000.0}) for labels, own in slow]
    assert "routing_dilution" in causes(verdict(*fleet(2), *computed, usual=usual))


def test_imbalance_between_two_replicas() -> None:
    assert causes(verdict((pod("a"), HOT), (pod("b"), {}))) == {"replica_imbalance": ("a",)}


def test_imbalance_between_data_parallel_engines() -> None:
    engines: list[Row] = [(pod("a", engine=str(at)), {}) for at in range(3)]
    diagnosis = verdict(*engines, (pod("a", engine="3"), HOT))
    assert causes(diagnosis) == {"replica_imbalance": ("a engine 3",)}
    assert "data-parallel engines of one replica" in diagnosis.causes[0].summary


def test_an_imbalance_of_tokens_where_requests_are_even() -> None:
    long = {"kv_usage_avg_ratio": 0.95, "waiting": 1.0}
    others: list[Row] = [(pod(str(at)), {"kv_usage_avg_ratio": 0.3}) for at in range(5)]
    diagnosis = verdict(*others, (pod("long"), long))
    assert causes(diagnosis) == {"replica_imbalance": ("long",)}
    (cause,) = diagnosis.causes
    assert "a KV cache 95% full" in cause.summary
    assert causes(verdict(*others, (pod("long"), {"kv_usage_avg_ratio": 0.55}))) == {}


def test_longer_requests_harm_under_their_own_cause() -> None:
    asked = {"arrival_per_s": 2.0, "waiting_slope_per_s": 1.0}
    rows: list[Row] = [(pod(str(at)), {"prompt_tokens_mean": 1500.0}) for at in range(5)]
    severities = [
        next(each.severity for each in found.causes if each.id == "replica_imbalance")
        for tokens in (1500.0, 60_000.0)
        if (found := verdict(*rows, (pod("hot"), {**HOT, **asked, "prompt_tokens_mean": tokens})))
    ]
    assert severities == [Severity.WARNING, Severity.INFO]


@pytest.mark.parametrize(
    "piles_up",
    [
        pytest.param({"generation_tokens_per_s": 0.0}, id="it generates nothing"),
        pytest.param({"stalled_s": 15.0}, id="it makes no progress"),
        pytest.param({"backlog_drains": 1.0}, id="what is left of a fault drains"),
        pytest.param({"waiting": 30.0, "waiting_slope_per_s": -1.0}, id="its queue shrinks"),
        pytest.param({"arrival_per_s": 2.0}, id="it gets no more requests than others"),
        pytest.param({"kv_usage_ratio": 0.99, "arrival_per_s": 2.0}, id="one sample of KV usage"),
    ],
)
def test_load_that_piles_up_is_no_imbalance(piles_up: dict[str, float]) -> None:
    hot = {**HOT, "kv_usage_avg_ratio": 0.5, **piles_up}
    assert "replica_imbalance" not in causes(verdict(*fleet(5), (pod("hot"), hot)))


def test_a_router_that_sends_all_to_one_engine_is_named() -> None:
    idle: list[Row] = [
        (pod(str(at)), {"arrival_per_s": 0.0, "running": 0.0, "running_avg": 0.0})
        for at in range(5)
    ]
    (cause,) = [
        each for each in verdict(*idle, (pod("hot"), HOT)).causes if each.id == "replica_imbalance"
    ]
    assert "the router sends it 100% of the requests" in cause.summary
    assert "More replicas would not help" in cause.lever
    text = next(each.text for each in cause.evidence if each.signal == "running_avg")
    assert text.endswith("requests in flight, the median is 0")


def test_requests_that_one_engine_gets_instead_of_others_are_no_new_demand() -> None:
    more = {"demand_moved_ratio": 6.0, "moved_for_s": 120.0}
    hurt = {"hot": {"load_hurts": 60.0}}
    alone = verdict((pod("hot"), {**HOT, **more}), streaks_s=hurt)
    assert "workload_drift" in causes(alone)
    assert set(causes(verdict(*fleet(5), (pod("hot"), {**HOT, **more}), streaks_s=hurt))) == {
        "replica_imbalance"
    }


@pytest.mark.parametrize(
    ("was_running", "severity"),
    [
        pytest.param(5.0, Severity.CRITICAL, id="busy within the hour"),
        pytest.param(0.1, Severity.INFO, id="idle for long"),
    ],
)
def test_replicas_that_get_no_requests_any_more_are_lost_also_without_a_queue(
    was_running: float, severity: Severity
) -> None:
    own = {"arrival_per_s": 0.0, "running": 0.0, "running_avg": 0.0}
    own["running_hour_avg"] = was_running
    idle: list[Row] = [(pod(str(at)), own) for at in range(2)]
    found = verdict(*idle, (pod("hot"), {**HOT, "waiting": 0.0})).causes
    assert {each.severity for each in found if each.id == "replica_imbalance"} == {severity}


def test_an_imbalance_among_engines_that_are_all_full_explains_nothing() -> None:
    full = {"running": 16.0, "running_avg": 16.0, "waiting": 5.0, "kv_usage_ratio": 0.97}
    rows: list[Row] = [(pod(str(at)), full) for at in range(5)]
    (cause,) = [
        each
        for each in verdict(*rows, (pod("hot"), {**HOT, "kv_usage_ratio": 0.99})).causes
        if each.id == "replica_imbalance"
    ]
    assert cause.explains == ()


def test_an_imbalance_that_harms_nobody_is_a_note() -> None:
    diagnosis = verdict(*fleet(5), (pod("hot"), {**HOT, "waiting": 0.0}))
    assert diagnosis.causes[0].severity == Severity.INFO


def test_a_slow_replica_is_no_imbalance() -> None:
    slow = {**SLOW, "running": 48.0, "running_avg": 48.0, "waiting": 10.0}
    diagnosis = verdict(*fleet(5), (pod("slow", node="n7"), slow))
    assert causes(diagnosis) == {"bad_node": ("slow",)}
    assert "n7" in diagnosis.causes[0].summary


def test_load_that_piles_up_on_a_gpu_with_low_clocks_is_no_imbalance() -> None:
    hot = {**HOT, "arrival_per_s": 2.0, "waiting_slope_per_s": 1.0}
    names = [*(str(at) for at in range(5)), "hot"]
    rows: list[Row] = [(pod(name), hot if name == "hot" else {}) for name in names]
    assert "replica_imbalance" in causes(verdict(*rows))
    clocks = {name: {"sm_clock_mhz": 700.0 if name == "hot" else 1980.0} for name in names}
    assert causes(verdict(*rows, gpus=clocks)).keys() == {"bad_node"}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_gpu_with_low_clocks_is_named_also_beside_one_other_replica(replicas: int) -> None:
    clocks = {f"r{at}": {"sm_clock_mhz": 1980.0} for at in range(replicas - 1)}
    clocks["slow"] = {"sm_clock_mhz": 900.0}
    rows = (*fleet(replicas - 1), (pod("slow"), SLOW))
    assert causes(verdict(*rows, gpus=clocks)) == {"bad_node": ("slow",)}


@pytest.mark.parametrize(
    ("slower", "longer", "named"),
    [
        pytest.param(2.5, 1.0, True, id="the slower of two"),
        pytest.param(1.7, 1.0, False, id="as two may differ"),
        pytest.param(2.5, 2.0, False, id="its prompts are longer"),
    ],
)
def test_of_two_replicas_the_one_that_is_twice_as_slow_is_named(
    slower: float, longer: float, named: bool
) -> None:
    alike = {"itl_p50_s": 0.02, "itl_mean_s": 0.02, "prompt_tokens_mean": 500.0,
             "output_tokens_mean": 200.0}  # fmt: skip
    slow = {
        **alike,
        "itl_p50_s": slower * 0.02,
        "itl_mean_s": slower * 0.02,
        "prompt_tokens_mean": longer * 500.0,
    }
    verdict_of_two = verdict((pod("r0"), alike), (pod("slow"), slow))
    assert causes(verdict_of_two) == ({"bad_node": ("slow",)} if named else {})


def test_a_gpu_with_low_clocks_and_xid_makes_the_case_stronger() -> None:
    well = {f"r{at}": {"sm_clock_mhz": 1980.0, "temperature_c": 50.0} for at in range(5)}
    ill = {"sm_clock_mhz": 1200.0, "temperature_c": 85.0, "xid": 79.0}
    plain = verdict(*fleet(5), (pod("slow"), SLOW)).causes[0]
    faulty = verdict(*fleet(5), (pod("slow"), SLOW), gpus={**well, "slow": ill}).causes[0]
    fine = verdict(*fleet(5), (pod("slow"), SLOW), gpus={**well, "slow": well["r0"]}).causes[0]
    assert fine.confidence < plain.confidence < faulty.confidence
    assert "XID 79" in " ".join(item.text for item in faulty.evidence)
    assert fine.against


def dead_gpu(**more: bool) -> GpuState:
    return GpuState("3", "", "n7", "", xids=(XidSeen(79, None, **more),))


def test_a_gpu_with_an_xid_explains_the_slow_replica() -> None:
    own = {"gpus": 1.0, "xid": 79.0}
    rows = (*fleet(5), (pod("slow"), SLOW))
    diagnosis = verdict(*rows, gpus={"slow": own}, faulty_gpus={"slow": [dead_gpu()]})
    assert causes(diagnosis) == {"gpu_fault": ("slow",)}
    (fault,) = diagnosis.causes
    assert (fault.severity, fault.explains) == (Severity.CRITICAL, ("bad_node",))
    assert "GPU 3 of n7" in fault.summary


def test_a_gpu_that_works_again_or_may_be_of_another_pod_explains_nothing() -> None:
    rows = (*fleet(5), (pod("slow"), SLOW))
    works = verdict(
        *rows,
        gpus={"slow": {"gpus": 1.0, "xid": 79.0}},
        faulty_gpus={"slow": [dead_gpu(worked_since=True)]},
    )
    of_node = verdict(*rows, gpus={"slow": {"xid": 79.0}}, faulty_gpus={"slow": [dead_gpu()]})
    for diagnosis, severity in ((works, Severity.INFO), (of_node, Severity.WARNING)):
        assert causes(diagnosis).keys() == {"bad_node", "gpu_fault"}
        severities = {c.id: c.severity for c in diagnosis.causes}
        assert severities["gpu_fault"] <= severity


def test_a_median_beyond_the_edge_of_a_bucket_is_not_slow() -> None:
    peers = [(labels, {**own, "itl_mean_s": 0.024}) for labels, own in fleet(5)]
    near = (pod("near"), {**SLOW, "itl_mean_s": 0.026})
    slow = (pod("slow"), {**SLOW, "itl_mean_s": 0.06})
    assert causes(verdict(*peers, near, slow)) == {"bad_node": ("slow",)}


FULL = {
    "kv_usage_ratio": 0.99,
    "kv_usage_avg_ratio": 0.98,
    "preemption_per_s": 4.0,
    "preemption_ratio_per_s": 0.2,
    "waiting": 6.0,
    "waiting_by_capacity": 6.0,
}


def test_a_replica_whose_own_cause_makes_its_tokens_slow_is_no_bad_node() -> None:
    rows = (*fleet(5), (pod("full"), {**SLOW, **FULL}))
    assert causes(verdict(*rows)) == {"kv_pressure": ("full",)}
    clocks = {f"r{at}": {"sm_clock_mhz": 1980.0} for at in range(5)}
    alike = verdict(*rows, gpus={**clocks, "full": {"sm_clock_mhz": 1980.0}})
    assert causes(alike) == {"kv_pressure": ("full",)}
    throttled = verdict(*rows, gpus={**clocks, "full": {"sm_clock_mhz": 1200.0}})
    assert causes(throttled) == {"bad_node": ("full",)}
    assert throttled.causes[0].explains == ("kv_pressure",)


def test_a_queue_does_not_explain_slow_tokens() -> None:
    queued = {**SLOW, "waiting": 30.0, "waiting_by_capacity": 30.0, "expected_wait_s": 15.0}
    streaks_s = {"slow": {"queued": 600.0}}
    judged = verdict(*fleet(5), (pod("slow"), queued), streaks_s=streaks_s)
    assert causes(judged) == {"bad_node": ("slow",)}
    assert judged.causes[0].explains == ("queue_saturation",)


def test_two_replicas_do_not_say_which_is_slow() -> None:
    assert "bad_node" not in causes(verdict((pod("a"), SLOW), (pod("b"), {})))


def diluted(count: int, **more: float) -> list[Row]:
    return [(pod(f"r{at}"), {**DILUTED, **more}) for at in range(count)]


def test_hits_near_one_in_n_while_prompts_repeat() -> None:
    diagnosis = verdict(*diluted(4))
    assert causes(diagnosis) == {"routing_dilution": ("r0", "r1", "r2", "r3")}
    assert diagnosis.causes[0].severity == Severity.WARNING


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(diluted(1), id="one replica has no routing"),
        pytest.param(diluted(4, prefill_tokens_p10=1400.0), id="no prompt repeats"),
        pytest.param(diluted(4, prefill_tokens_p90=200.0), id="no prompt misses whole"),
        pytest.param(diluted(4, prefix_hit_ratio=0.9), id="repeats do hit"),
        pytest.param(diluted(4, prefix_query_per_s=20.0), id="hardly a prompt"),
        pytest.param([*diluted(2), *fleet(6)[2:]], id="most replicas hit"),
    ],
)
def test_low_hits_that_are_not_the_routing(rows: list[Row]) -> None:
    assert "routing_dilution" not in causes(verdict(*rows))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(diluted(4, kv_capacity_tokens=1e8), id="blocks live for long"),
        pytest.param(diluted(4, prefix_hit_ratio=0.6), id="far more hits than by chance"),
    ],
)
def test_without_a_past_first_turns_may_look_the_same(rows: list[Row]) -> None:
    (cause,) = (c for c in verdict(*rows).causes if c.id == "routing_dilution")
    assert cause.severity == Severity.INFO
    assert "New sessions look the same" in cause.summary


def test_prompts_that_share_nothing_are_not_routed_wrong() -> None:
    assert "routing_dilution" not in causes(verdict(*diluted(4, prefix_hit_ratio=0.0)))


GROUP = ("prod/m", "", "")
USUALLY: Mapping[Group, Usual] = {
    GROUP: Usual(hit_ratio=0.64, query_per_s=12_000.0, ttft_p50_s=0.107)
}
LENGTHS: Mapping[Group, Mapping[str, Histogram]] = {
    GROUP: {"prompt_tokens_mean": {1000.0: 2e4, 2000.0: 8e4, inf: 1e5}}
}
FALLEN = {"prefix_hit_ratio": 0.19, "ttft_p50_s": 0.2, "kv_capacity_tokens": 1e6}


def routing(
    rows: list[Row],
    usual: Mapping[Group, Usual] = USUALLY,
    ttft_target_s: float | None = None,
    expected: float | None = None,
) -> dict[str, Cause]:
    """What is reported of lost hits, by id."""
    targets = Targets(ttft_p99_s=ttft_target_s)
    profile = Profile(targets=targets, expected_prefix_hit_ratio=expected)
    diagnosis = verdict(*rows, usual=usual, recent=LENGTHS, profile=profile)
    lost = ("routing_dilution", "prefix_reuse_lost")
    return {c.id: c for c in diagnosis.causes if c.id in lost}


def pool(**changes: float) -> list[Row]:
    return [(pod(f"r{at}"), {**FALLEN, **changes}) for at in range(4)]


def test_hits_below_those_of_the_past() -> None:
    cause = routing(pool())["routing_dilution"]
    assert cause.severity == Severity.WARNING
    assert "hit ratio 19%, usually 64%, on 4 of 4 engines" in cause.summary
    assert "2.3x the prompt tokens" in cause.summary


LOW: Mapping[Group, Usual] = {GROUP: Usual(hit_ratio=0.2, query_per_s=12_000.0, ttft_p50_s=0.2)}


def test_hits_as_in_the_past_are_usual_however_low() -> None:
    assert routing(pool(prefill_tokens_p90=1450.0), LOW) == {}


def test_a_pool_that_never_hit_as_expected_was_routed_wrong_from_its_first_day() -> None:
    cause = routing(pool(), LOW, expected=0.8)["routing_dilution"]
    assert cause.severity == Severity.WARNING
    assert "hit ratio 19%, expected 80%, on 4 of 4 engines" in cause.summary
    assert routing(pool(), LOW, expected=0.2) == {}


@pytest.mark.parametrize(
    ("rows", "ttft_target_s"),
    [
        pytest.param(pool(ttft_p50_s=0.345), None, id="TTFT P50 is three times its usual value"),
        pytest.param(pool(ttft_p99_s=2.0), 1.0, id="the target is missed"),
    ],
)
def test_dilution_that_harms_is_critical(rows: list[Row], ttft_target_s: float | None) -> None:
    assert (
        routing(rows, ttft_target_s=ttft_target_s)["routing_dilution"].severity == Severity.CRITICAL
    )


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([*pool()[:2], *fleet(6)[2:]], id="most replicas hit"),
        pytest.param(pool(age_s=120.0), id="their caches are cold"),
        pytest.param(pool(prefix_hit_ratio=0.03), id="prompts share nothing any more"),
        pytest.param(pool(prefix_hit_recent_ratio=0.05), id="hits are still falling"),
        pytest.param(pool(prompt_tokens_p50=2000.0, prefix_hit_ratio=0.4), id="prompts are longer"),
        pytest.param(
            pool(prefix_query_per_s=9000.0, prefix_hit_ratio=0.4), id="three times the load"
        ),
    ],
)
def test_a_fall_that_is_not_the_routing(rows: list[Row]) -> None:
    cause = routing(rows).get("routing_dilution")
    assert cause is None or cause.severity < Severity.WARNING


def test_new_replicas_and_short_lived_blocks_add_to_the_case() -> None:
    plain = routing(pool(prefix_hit_ratio=0.4))["routing_dilution"].confidence
    short = routing(pool(prefix_hit_ratio=0.4, kv_capacity_tokens=4e4))["routing_dilution"]
    grown = routing([*pool(prefix_hit_ratio=0.4), (pod("new"), {**FALLEN, "age_s": 900.0})])[
        "routing_dilution"
    ]
    assert plain < short.confidence
    assert plain < grown.confidence


def test_prompts_that_stopped_sharing_are_told_apart_from_routing() -> None:
    heavy = {"computed_prompt_tokens_per_s": 3000.0, "prefill_service_ratio": 0.3}
    causes_by_id = routing(pool(prefix_hit_ratio=0.0, **heavy))
    assert list(causes_by_id) == ["prefix_reuse_lost"]
    assert "baseline 64%" in causes_by_id["prefix_reuse_lost"].summary
    routed = routing(pool(**heavy))
    assert list(routed) == ["routing_dilution"]
    assert "prefix_reuse_lost" in routed["routing_dilution"].explains


def hour(hits: float, per_s: float = 1000.0) -> dict[str, float]:
    return {"prefix_hit_ratio": hits, "prefix_query_per_s": per_s, "ttft_p50_s": 0.1}


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        pytest.param({900.0: hour(0.6), 4500.0: hour(0.7)}, 0.65, id="the median"),
        pytest.param({900.0: hour(0.1), 4500.0: hour(0.7)}, 0.4, id="after an hour of harm"),
        pytest.param({900.0: hour(0.7), 86_400.0: hour(0.1)}, 0.1, id="low at this time of day"),
        pytest.param({900.0: hour(0.7), 4500.0: hour(0.0, 1.0)}, 0.7, id="an idle hour"),
        pytest.param({900.0: hour(0.7, 1.0)}, None, id="too few tokens"),
        pytest.param({}, None, id="no past"),
    ],
)
def test_the_usual_hit_ratio(hours: Mapping[float, dict[str, float]], expected: float) -> None:
    usual = usual_of(hours)
    assert (None if usual is None else usual.hit_ratio) == (
        None if expected is None else pytest.approx(expected)
    )


def test_kinds_of_gpu_behind_one_balancer() -> None:
    slow = {"ttft_p99_s": 1.2, "itl_p99_s": 0.1}
    a100 = [(pod(f"a{at}", tier="A100"), slow) for at in range(2)]
    diagnosis = verdict(*fleet(6, tier="H100"), *a100)
    assert causes(diagnosis) == {"mixed_tiers": ("a0", "a1")}
    routed = [(labels, {**own, "arrival_per_s": 0.4}) for labels, own in a100]
    apart = verdict(*fleet(6, tier="H100"), *routed)
    assert causes(apart) == {}


def test_kinds_of_gpu_that_are_equally_fast_do_no_harm() -> None:
    assert causes(verdict(*fleet(3, tier="H100"), (pod("x", tier="H200"), {}))) == {}


def test_tiers_are_never_compared_or_averaged() -> None:
    fast = [(pod(f"f{at}", tier="B200"), {"itl_p50_s": 0.005}) for at in range(5)]
    diagnosis = verdict(*fast, (pod("x", tier="H100"), {}))
    assert "bad_node" not in causes(diagnosis)
    assert [tier.tier for tier in diagnosis.tiers] == ["B200", "H100"]


def test_a_cold_replica_among_warm_ones() -> None:
    cold = {"age_s": 90.0, "prefix_hit_ratio": 0.2, "ttft_p99_s": 1.0}
    diagnosis = verdict(*fleet(5), (pod("new"), cold))
    assert causes(diagnosis) == {"cold_replica": ("new",)}
    assert diagnosis.health == "info"


def test_a_rollout_is_no_cold_replica() -> None:
    assert causes(verdict(*[(pod(f"r{at}"), {"age_s": 60.0}) for at in range(4)])) == {}


def test_idle_for_an_hour() -> None:
    idle = {"running_hour_avg": 0.1}
    diagnosis = verdict(*fleet(2), (pod("i"), idle), (pod("j"), idle))
    assert causes(diagnosis) == {"underused": ("i", "j")}
    assert diagnosis.causes[0].severity == Severity.INFO


@pytest.mark.parametrize("of_prefill", [{"role": "prefill"}, {}])
def test_prefill_replicas_that_work_are_not_idle(of_prefill: dict[str, str]) -> None:
    """Their requests are over before a scrape can see many of them."""
    for arrival_per_s, found in ((3.0, set[str]()), (0.0, {"underused"})):
        works = {"running_hour_avg": 0.1, "arrival_per_s": arrival_per_s, "output_tokens_mean": 1.0}
        rows: list[Row] = [(pod(f"r{at}", **of_prefill), works) for at in range(3)]
        assert causes(verdict(*rows)).keys() & {"underused"} == found


def test_less_than_an_hour_says_nothing_of_hours() -> None:
    young = [(labels, {"running_hour_avg": 0.1}) for labels, _ in fleet(2)]
    assert causes(verdict(*young, lacking=("running_hour_ago",))) == {}


def test_a_replica_that_does_not_answer() -> None:
    diagnosis = verdict(
        *fleet(3), gone=[Gone("r9", "prod/m", Why.DOWN), Gone("r8", "prod/m", Why.LEFT)]
    )
    assert causes(diagnosis) == {"target_down": ("r9",)}
    assert diagnosis.health == "critical"
    assert any("r8" in note for note in diagnosis.notes)


def test_what_is_not_known_is_never_healthy() -> None:
    assert verdict().health == "unknown"
    assert verdict(*fleet(3), warnings=["a shard is down"]).health == "unknown"
    assert verdict(*fleet(3), failed={"ttft_p99_s": "timeout"}).health == "unknown"
    assert verdict(*fleet(3), lacking=("preemption_per_s",)).health == "unknown"
    assert verdict(*fleet(3), lacking=("kv_usage_ratio",)).engines[0].stage is None


USUAL_LENGTHS = {100.0: 2e4, 1000.0: 8e4, inf: 1e5}


def drifted(now: Mapping[float, float]) -> dict[str, tuple[str, ...]]:
    pair = {"prompt_tokens_mean": (USUAL_LENGTHS, now)}
    return causes(verdict(*fleet(3), lengths={("prod/m", "", ""): pair}))


def test_prompts_of_another_length_than_a_week_ago() -> None:
    assert drifted({100.0: 1e4, 1000.0: 4e4, inf: 1e5}) == {"workload_drift": ("r0", "r1", "r2")}


def test_a_busier_hour_of_the_same_requests_is_no_drift() -> None:
    assert drifted({edge: 3 * count for edge, count in USUAL_LENGTHS.items()}) == {}


def test_a_few_other_requests_are_no_drift() -> None:
    assert drifted({100.0: 0.0, 1000.0: 0.0, inf: 30.0}) == {}


QUEUED = {"waiting": 6.0, "waiting_by_capacity": 6.0}
PER_GPU = {1: 1000.0, 4: 500.0}


def split_fleet(per_gpu: Mapping[int, float] = PER_GPU, **more: float) -> FleetVerdict:
    """Two replicas each on so many GPUs, with so many tokens a second and GPU, and queues."""
    rows: list[Row] = []
    for gpus, tokens in per_gpu.items():
        own = {**QUEUED, "generation_tokens_per_s": gpus * tokens}
        own["computed_prompt_tokens_per_s"] = 0.75 * gpus * tokens
        rows += [(pod(f"tp{gpus}-{at}", tier="H100"), {**own, **more}) for at in range(2)]
    counts = {str(labels["pod"]): float(labels["pod"][2]) for labels, _ in rows}
    return verdict(*rows, gpus={name: {"gpus": count} for name, count in counts.items()})


def test_tensor_parallelism_that_halves_what_a_gpu_gives() -> None:
    diagnosis = split_fleet()
    (overhead,) = [overhead for overhead in diagnosis.causes if overhead.id == "tp_overhead"]
    assert overhead.replicas == ("tp4-0", "tp4-1")
    assert overhead.severity == Severity.INFO
    assert "4 GPUs lose 50%" in overhead.summary


def test_of_several_splits_each_is_held_against_the_best_below_it() -> None:
    diagnosis = split_fleet({1: 1000.0, 2: 900.0, 8: 300.0})
    assert [c.replicas for c in diagnosis.causes if c.id == "tp_overhead"] == [("tp8-0", "tp8-1")]


@pytest.mark.parametrize(
    "diagnosis",
    [
        pytest.param(split_fleet({1: 1000.0, 4: 800.0}), id="hardly less"),
        pytest.param(split_fleet({1: 500.0, 4: 1000.0}), id="more a GPU"),
        pytest.param(split_fleet(waiting_by_capacity=0.0), id="no queue"),
        pytest.param(split_fleet({4: 500.0}), id="nothing to hold it against"),
        pytest.param(verdict(*[(pod("a"), {**QUEUED}), (pod("b"), {**QUEUED})]), id="no GPUs"),
    ],
)
def test_no_overhead_without_proof(diagnosis: FleetVerdict) -> None:
    assert "tp_overhead" not in causes(diagnosis)


def test_other_requests_are_no_proof() -> None:
    wide = {**QUEUED, "generation_tokens_per_s": 2000.0, "computed_prompt_tokens_per_s": 1500.0}
    narrow = {**QUEUED, "generation_tokens_per_s": 1000.0, "computed_prompt_tokens_per_s": 100.0}
    gpus = {"wide": {"gpus": 4.0}, "narrow": {"gpus": 1.0}}
    diagnosis = verdict((pod("wide"), wide), (pod("narrow"), narrow), gpus=gpus)
    assert "tp_overhead" not in causes(diagnosis)
    alike = {**narrow, "computed_prompt_tokens_per_s": 750.0}
    assert "tp_overhead" in causes(
        verdict((pod("wide"), wide), (pod("narrow"), alike), gpus=gpus)
    ), "with alike requests they are"


@pytest.mark.parametrize(
    ("waiting", "age_s", "found"),
    [(20.0, 9000.0, ("d3", "d4")), (0.0, 9000.0, ()), (20.0, 60.0, ())],
    ids=["others queue", "none queues", "they have just started"],
)
def test_engines_that_get_nothing_while_most_queue(
    waiting: float, age_s: float, found: tuple[str, ...]
) -> None:
    """As ai-dynamo/dynamo#7836: three of five decode workers get all requests."""
    busy = {"running_avg": 100.0, "waiting": waiting, "waiting_avg": waiting, "arrival_per_s": 9.0}
    idle = {"running_avg": 0.0, "waiting": 0.0, "waiting_avg": 0.0, "arrival_per_s": 0.0}
    rows = [(pod(f"d{at}"), {**(busy if at < 3 else idle), "age_s": age_s}) for at in range(5)]
    assert causes(verdict(*rows)).get("replica_imbalance", ()) == found
