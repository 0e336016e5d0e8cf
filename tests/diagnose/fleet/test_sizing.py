"""Replicas for the measured peak: more, fewer, as many, and when nothing may be said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.account_signals import DRAINS
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import Gone, Peak, Why, peak_of
from kneewatch.diagnose.fleet.verdict import FleetVerdict, TierSize
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_rendering import text
from kneewatch.rules.rule import WEEK_S
from tests.diagnose.fleet.example_fleets import Row, fleet, pod, verdict

GROUP = ("prod/m", "", "")
KNOWN = Profile(
    stated=Stated(model=model("meta-llama/Llama-3.1-8B-Instruct"), gpu=gpu("h100-sxm"),
                  tensor_parallel=1)
)  # fmt: skip
SIZED = {
    "running": 8.0,
    "kv_usage_avg_ratio": 0.05,
    "kv_usage_ratio": 0.05,
    "kv_capacity_tokens": 400_000.0,
    "prompt_tokens_mean": 1500.0,
    "output_tokens_mean": 200.0,
    "itl_mean_s": 0.01,
}
"""An engine that holds 8 requests of 2,500 tokens, and 144 of them in 90 % of its cache."""


def peak(requests: float, *, span_s: float = WEEK_S, seen_ratio: float = 1.0) -> Peak:
    return Peak(requests, 1_795_000_000.0, requests / 2, span_s, seen_ratio)


def rows(count: int, **more: float) -> list[Row]:
    return [(labels, {**SIZED, **more}) for labels, _ in fleet(count)]


def sized(
    most: Peak | None, *engines: Row, count: int = 10, profile: Profile = KNOWN, gone: int = 0
) -> tuple[FleetVerdict, TierSize]:
    diagnosis = verdict(
        *(engines or rows(count)),
        peaks={} if most is None else {GROUP: most},
        profile=profile,
        gone=[Gone(f"gone{at}", "prod/m", Why.DOWN) for at in range(gone)],
    )
    (size,) = [tier.size for tier in diagnosis.tiers]
    return diagnosis, size


def test_a_quiet_week_lets_replicas_go_with_the_saving_in_money() -> None:
    diagnosis, size = sized(peak(100.0))
    assert (size.present, size.needed) == (10, 2)
    (lever,) = diagnosis.advice
    assert lever.id == "fewer-replicas"
    assert lever.cost_usd_per_hour == pytest.approx(-8 * 3.0), "8 H100 at the catalogue's price"
    assert "50%" in lever.summary


def test_a_peak_of_most_of_the_tier_keeps_it() -> None:
    _, size = sized(peak(1000.0))
    assert size.needed == 10
    assert "right" in size.why


def test_a_peak_beyond_the_tier_wants_more() -> None:
    diagnosis, size = sized(peak(2000.0))
    # 2,000 x 2,500 tokens on 10 x 400,000, and 30 % on top.
    assert size.needed == 17
    assert diagnosis.advice[0].cost_usd_per_hour == pytest.approx(7 * 3.0)


def test_a_tier_that_presses_its_cache_wants_more_without_any_peak_beyond() -> None:
    pressed = rows(10, kv_usage_ratio=0.99, kv_usage_avg_ratio=0.99, preemption_per_s=3.0,
                   preemption_ratio_per_s=0.3, waiting_by_capacity=8.0, waiting=8.0,
                   running=100.0, running_avg=100.0)  # fmt: skip
    _, size = sized(peak(1080.0), *pressed)
    assert size.needed is not None
    assert size.needed > 10


def overloaded(waiting: float, growth_per_s: float) -> list[Row]:
    """Eight replicas that serve 4 requests/s each with all seats taken, and their queues."""
    return rows(8, running=26.0, running_avg=26.0, running_max=26.0, waiting=waiting,
                waiting_by_capacity=waiting, waiting_avg=waiting, waiting_min=waiting,
                waiting_slope_per_s=growth_per_s, completed_per_s=4.0, arrival_per_s=4.0,
                kv_usage_ratio=0.2, kv_usage_avg_ratio=0.2)  # fmt: skip


@pytest.mark.parametrize("waiting", [20.0, 230.0, 2300.0])
def test_a_backlog_is_no_demand(waiting: float) -> None:
    diagnosis, size = sized(peak(208.0), *overloaded(waiting, 0.24))
    # 6 % more arrive than are served: 8 x 1.06 = 8.48, and with the safety factor of 1.3 11.02.
    assert size.needed == 12
    (lever,) = [advice for advice in diagnosis.advice if advice.id == "replicas"]
    assert "it needs 9, or 12 with a safety factor of 1.3" in lever.summary
    spare_per_s = 12 * 4.0 - 8 * 4.24
    assert lever.predicted["backlog_drain_s"] == pytest.approx(8 * waiting / spare_per_s, rel=1e-3)


def test_a_long_backlog_names_what_would_drain_it_sooner() -> None:
    diagnosis, _ = sized(peak(208.0), *overloaded(2300.0, 0.24))
    (lever,) = [advice for advice in diagnosis.advice if advice.id == "replicas"]
    # 18,400 requests in 300 s are 61.3/s, 14.1/s are spare: 12 more replicas of 4/s.
    assert (
        "18,400 requests wait on 8 replicas: drained in about 22 min, or in 5 min with 12"
        in lever.summary
    )


def test_a_backlog_that_an_ended_fault_left_is_no_lack_of_replicas() -> None:
    alone = overloaded(700.0, -0.4)[:1]
    assert sized(peak(26.0), *alone)[1].needed == 2
    diagnosis, size = sized(peak(26.0), *[(labels, {**row, DRAINS: 1.0}) for labels, row in alone])
    assert (size.needed, list(diagnosis.advice)) == (1, [])


def test_one_hot_replica_is_no_reason_for_more() -> None:
    hot = (pod("hot"), {**SIZED, "waiting": 10.0, "running": 40.0, "running_avg": 40.0,
                        "preemption_per_s": 3.0, "arrival_per_s": 9.0})  # fmt: skip
    diagnosis, size = sized(peak(1000.0), *rows(9), hot)
    assert size.needed == 10
    assert all(advice.id != "replicas" for advice in diagnosis.advice)


@pytest.mark.parametrize(
    ("most", "why"),
    [
        pytest.param(peak(100.0, span_s=WEEK_S / 2), "a week's peak", id="half a week"),
        pytest.param(peak(100.0, seen_ratio=0.9), "a week's peak", id="a tenth not seen"),
    ],
)
def test_no_fewer_on_too_little_history(most: Peak, why: str) -> None:
    _, size = sized(most)
    assert size.needed == 10
    assert why in size.why


def test_no_fewer_while_a_replica_is_ill() -> None:
    ill = (pod("ill"), {**SIZED, "preemption_per_s": 3.0, "preemption_ratio_per_s": 0.3,
                        "waiting_by_capacity": 8.0})  # fmt: skip
    _, size = sized(peak(100.0), *rows(9), ill)
    assert size.needed == 10
    assert "there is a problem" in size.why


def test_while_a_replica_is_down_nobody_is_told_to_scale_to_the_others() -> None:
    _, size = sized(peak(100.0), gone=1)
    assert size.needed is None


def test_no_fewer_where_nothing_says_what_itl_would_be() -> None:
    diagnosis, size = sized(peak(100.0), profile=Profile())
    assert size.needed == 10
    assert "ITL" in size.why
    assert not diagnosis.advice


def test_at_night_nobody_is_sent_home() -> None:
    _, size = sized(peak(100.0), *rows(10, running=0.0, running_avg=0.0))
    assert size.needed == 10
    assert "no request is running" in size.why


@pytest.mark.parametrize(
    "blind", [{"warnings": ["a shard is down"]}, {"failed": {"running": "timeout"}}]
)
def test_a_partial_answer_gives_no_number(blind: dict[str, list[str]]) -> None:
    diagnosis = verdict(*rows(10), peaks={GROUP: peak(100.0)}, profile=KNOWN, **blind)  # type: ignore[arg-type]
    assert [tier.size.needed for tier in diagnosis.tiers] == [None]
    assert not diagnosis.advice


def test_an_engine_that_cannot_be_read_gives_no_number() -> None:
    diagnosis = verdict(*rows(10), lacking=("kv_usage_ratio",), peaks={GROUP: peak(100.0)})
    assert diagnosis.tiers[0].size.needed is None


def test_without_a_past_nothing_is_said() -> None:
    _, size = sized(None)
    assert size.needed is None


def of_engines(most: float, engines: int) -> tuple[FleetVerdict, TierSize]:
    """Ten replicas of so many engines on two GPUs each, as DCGM counts them, at so many requests
    an engine."""
    diagnosis = verdict(
        *(
            (pod(f"r{at}", engine=str(engine)), SIZED)
            for at in range(10)
            for engine in range(engines)
        ),
        peaks={GROUP: peak(most * 10 * engines)},
        profile=Profile(stated=replace(KNOWN.stated, tensor_parallel=None)),
        gpus={f"r{at}": {"gpus": 2.0 * engines} for at in range(10)},
    )
    (size,) = [tier.size for tier in diagnosis.tiers]
    return diagnosis, size


@pytest.mark.parametrize(("most", "needed"), [(10.0, 2), (100.0, 10), (200.0, 17)])
def test_data_parallel_engines_are_counted_in_replicas(most: float, needed: int) -> None:
    (plain, single), (packed, four) = of_engines(most, 1), of_engines(most, 4)
    assert (four.present, four.needed, four.gpus_each) == (10, needed, 8)
    assert (single.needed, single.gpus_each) == (needed, 2)
    assert four.used_ratio == pytest.approx(single.used_ratio)
    assert four.usd_per_hour == pytest.approx(10 * 8 * 3.0)
    for alone, advice in zip(plain.advice, packed.advice, strict=True):
        assert advice.cost_usd_per_hour == pytest.approx((needed - 10) * 8 * 3.0)
        assert advice.predicted["usd_per_hour"] == pytest.approx(needed * 8 * 3.0)
        key = "usd_per_million_tokens"
        assert advice.before[key] == pytest.approx(alone.before[key])


def test_one_is_one_in_words() -> None:
    gone = [Gone("r1", "prod/m", Why.DOWN)]
    shown = text(verdict(*rows(1), gone=gone), Style())
    assert "1 replica, 1 engine: " in shown
    assert "1 of 2 replicas is down (scrapes fail): r1" in shown


def test_replicas_that_lack_engines_are_not_sized() -> None:
    engines: list[Row] = [(pod("a", engine=str(at)), SIZED) for at in range(4)]
    _, size = sized(peak(4.0), *engines, *rows(2))
    assert (size.needed, size.gpus_each) == (None, None)
    assert size.usd_per_hour == pytest.approx(6 * 3.0)
    assert "differ in" in size.why


@given(st.floats(1.0, 5000.0), st.integers(2, 60))
def test_whatever_the_peak_the_tier_still_holds_it(most: float, count: int) -> None:
    _, size = sized(peak(most), count=count)
    assert size.needed is not None
    assert size.needed >= 2
    assert size.needed * 400_000 >= most * 2500


def test_routing_is_advised_with_what_it_would_save() -> None:
    diluted = {
        "prefix_hit_ratio": 0.3,
        "prefill_tokens_p90": 1450.0,
        "computed_prompt_tokens_per_s": 2100.0,
    }
    diagnosis, _ = sized(peak(1000.0), *rows(10, **diluted))
    (lever,) = diagnosis.advice
    assert lever.id == "prefix-routing"
    assert lever.predicted["prefix_hit_ratio"] == pytest.approx(0.96)
    assert lever.predicted["computed_prompt_tokens_per_s"] == pytest.approx(2100 * 0.04 / 0.7)


def disaggregated(
    prefill: int, decode: int, *, busy: float, held_ratio: float, engines: int = 1
) -> FleetVerdict:
    sides = [
        *((pod(f"p{at}", role="prefill", engine=str(engine)),
           {**SIZED, "running": busy, "running_avg": busy})
          for at in range(prefill) for engine in range(engines)),
        *((pod(f"d{at}", role="decode"),
           {**SIZED, "running": 144 * held_ratio, "running_avg": 144 * held_ratio,
            "kv_usage_avg_ratio": 0.9 * held_ratio}) for at in range(decode)),
    ]  # fmt: skip
    return verdict(*sides)


@pytest.mark.parametrize("engines", [1, 4])
def test_pools_of_a_disaggregated_fleet_are_split_by_their_work(engines: int) -> None:
    diagnosis = disaggregated(4, 4, busy=0.3, held_ratio=0.9, engines=engines)
    (lever,) = diagnosis.advice
    assert lever.id == "pd-ratio"
    # 4 x 0.3 of prefill and 4 x 0.9 of decode: 1:3.
    assert [(change.before, change.after) for change in lever.changes] == [(4, 2), (4, 6)]
    assert "1:3" in lever.summary
    assert "replica_imbalance" not in {fleet_cause.id for fleet_cause in diagnosis.causes}


@pytest.mark.parametrize(
    ("busy", "held_ratio"),
    [pytest.param(0.6, 0.7, id="even"), pytest.param(0.05, 0.15, id="hardly any work")],
)
def test_a_split_that_suits_the_work_is_left_alone(busy: float, held_ratio: float) -> None:
    assert not disaggregated(4, 4, busy=busy, held_ratio=held_ratio).advice


def test_the_split_is_told_beside_what_the_work_asks_for() -> None:
    diagnosis = disaggregated(2, 6, busy=0.6, held_ratio=0.6)
    (split,) = diagnosis.splits
    assert (split.prefill, split.decode, split.needed) == (2, 6, "1:3")
    assert split.prefill_used_ratio == pytest.approx(0.6, rel=0.02)
    assert split.decode_used_ratio == pytest.approx(0.6, rel=0.02)
    assert "2:6 prefill:decode replicas, the load needs 1:3" in " ".join(
        text(diagnosis, Style()).split()
    )
    assert verdict(*rows(4)).splits == [], "nobody says who prefills"


def test_a_peak_counts_what_was_seen() -> None:
    seen_peak = peak_of([(0.0, 1.0), (300.0, 5.0), (600.0, float("nan"))], span_s=900.0, steps=4)
    assert seen_peak == Peak(5.0, 300.0, 3.0, 900.0, 0.5)
    assert peak_of([(0.0, float("nan"))], span_s=900.0, steps=4) is None


# --- What is known about a tier's servers ---------------------------------------------------------

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
OF_0_26 = "registry.example/vllm-openai:v0.26.0"


def server_values(diagnosis: FleetVerdict) -> dict[str, tuple[object, str]]:
    (server,) = [tier.server for tier in diagnosis.tiers]
    return {fact.name: (fact.value, fact.source) for fact in server.facts}


def known_fleet(images: dict[str, str], profile: Profile | None = None) -> FleetVerdict:
    h100 = fleet(2, model_name=LLAMA, tier="NVIDIA H100 80GB HBM3")
    gpus = {name: {"gpus": 2.0} for name in ("r0", "r1")}
    return verdict(*h100, gpus=gpus, images=images, profile=profile)


def test_images_gpus_and_model_name_are_facts_with_their_sources() -> None:
    diagnosis = known_fleet({"r0": OF_0_26, "r1": OF_0_26})
    values = server_values(diagnosis)
    assert values["vllm_version"] == ("0.26.0", "pod")
    assert values["image"] == (OF_0_26, "pod")
    assert values["model"] == (LLAMA, "page")
    assert values["gpu"] == ("h100-sxm", "gpus")
    assert values["tensor_parallel"] == (2, "gpus")
    server = diagnosis.tiers[0].server
    assert {fact.age_s for fact in server.facts} == {0.0}
    assert "launch" in {missing.name for missing in server.unknown}
    assert f"server: vLLM 0.26.0, {LLAMA}, h100-sxm, TP 2; from: pod, page, gpus" in " ".join(
        text(verdict(*fleet(2, model_name=LLAMA, tier="NVIDIA H100 80GB HBM3"),
                     (pod("r2", model_name=LLAMA, tier="NVIDIA H100 80GB HBM3"),
                      {"preemption_per_s": 3.0, "preemption_ratio_per_s": 0.3,
                       "kv_usage_ratio": 1.0, "waiting": 20.0}),
                     gpus={name: {"gpus": 2.0} for name in ("r0", "r1", "r2")},
                     images=dict.fromkeys(("r0", "r1", "r2"), OF_0_26)),
             Style(width=200)).split()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("images", "note"),
    [
        ({"r0": OF_0_26, "r1": "vllm/vllm-openai:v0.32.0"}, "0.26.0, 0.32.0"),
        ({"r0": OF_0_26}, ""),
        ({"r0": OF_0_26, "r1": "vllm/vllm-openai:latest"}, ""),
        ({}, ""),
    ],
    ids=["a rollout", "one pod is unknown", "one tag names no release", "no kube-state-metrics"],
)
def test_a_version_of_some_replicas_is_none_of_the_tier(images: dict[str, str], note: str) -> None:
    diagnosis = known_fleet(images)
    assert "vllm_version" not in server_values(diagnosis)
    rolling = [line for line in diagnosis.notes if "different versions of vLLM" in line]
    assert [note in line for line in rolling] == ([True] if note else [])


def test_a_setting_wins_over_the_image_and_both_are_named() -> None:
    stated = Profile(stated=Stated(version=(0, 30, 0)))
    diagnosis = known_fleet({"r0": OF_0_26, "r1": OF_0_26}, stated)
    assert server_values(diagnosis)["vllm_version"] == ("0.30.0", "setting")
    assert any(
        "0.30.0 from setting is used, not 0.26.0 from pod" in line for line in diagnosis.notes
    )


def test_a_percentile_is_that_of_an_engine() -> None:
    fast, slow = rows(2, ttft_p99_s=20.0, running=9.0)
    diagnosis, _ = sized(None, (fast[0], {**fast[1], "ttft_p99_s": 4.0}), slow)
    signals = diagnosis.tiers[0].signals
    assert (signals["ttft_p99_s"].median, signals["ttft_p99_s"].mean) == (20.0, None)
    assert signals["running"].mean == 9.0
