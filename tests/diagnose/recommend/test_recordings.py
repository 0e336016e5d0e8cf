"""Recommendations on recordings of real servers."""

from __future__ import annotations

from functools import cache

import pytest

from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.adviser import MOST
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import WINDOW_S
from tests.diagnose.recommend.scenes import ADVISED, changes
from tests.recordings import CAPTURES, LAB, diagnoses
from tests.reports.documents import document
from tests.reports.schema import problems

FIRST = {
    "kv_pressure_cascade": ("kv_pressure", "kv-blocks"),
    "prefix_off": ("prefix_cache_off", "prefix-caching"),
    "queue_overload": ("admission_limit", "max-num-seqs-up"),
    "spec_bad": ("spec_decode_poor", "spec-off"),
    "lora_thrash": ("adapter_thrash", "max-loras"),
    "itl_spikes_no_chunked": ("prefill_interference", "long-prefill-threshold"),
    "prefix_churn": ("prefix_churn", "kv-blocks"),
}


@cache
def diagnoses_of(name: str) -> list[Verdict]:
    return diagnoses(CAPTURES / f"{name}.jsonl.gz")


def against(diagnosis: Verdict, cause_id: str) -> list[Advice]:
    return [advice for advice in diagnosis.recommendations if advice.cause == cause_id]


@pytest.mark.parametrize("name", FIRST)
def test_the_first_lever(name: str) -> None:
    cause_id, lever = FIRST[name]
    blaming = [d for d in diagnoses_of(name) if any(cause.id == cause_id for cause in d.causes)]
    blaming = [diagnosis for diagnosis in blaming if against(diagnosis, cause_id)]
    assert blaming
    for diagnosis in blaming:
        assert against(diagnosis, cause_id)[0].id == lever


@pytest.mark.parametrize("name", FIRST)
def test_documents_keep_the_schema(name: str) -> None:
    for diagnosis in diagnoses_of(name):
        assert problems(document(diagnosis)) == []
        causes = {cause.id for cause in diagnosis.causes}
        pairs = [(advice.id, advice.cause) for advice in diagnosis.recommendations]
        assert {cause for _, cause in pairs} <= causes & set(ADVISED)
        assert len(set(pairs)) == len(pairs)
        assert all(len(against(diagnosis, cause)) <= MOST for cause in causes)


def test_kv_pressure_in_the_cascade() -> None:
    evicting = [
        diagnosis
        for diagnosis in diagnoses_of("kv_pressure_cascade")
        if diagnosis.stage.number is not None and diagnosis.stage.number >= 2 and diagnosis.causes
    ]
    assert len(evicting) > 20
    for diagnosis in evicting:
        levers = {advice.id: advice for advice in diagnosis.recommendations}
        assert {"kv-blocks", "kv-fp8"} <= levers.keys()
        # While the queue drains, fewer requests arrive than are served.
        assert "replicas" in levers or diagnosis.values["waiting"] == 0
        fp8 = levers["kv-fp8"]
        # 160 blocks of 32 tokens; the same bytes in FP8 are 320, of which vLLM keeps one.
        assert changes(fp8) == {
            "--kv-cache-dtype": ("auto", "fp8"),
            "--num-gpu-blocks-override": (160, 320),
        }
        assert fp8.before["kv_capacity_tokens"] == 159 * 32
        assert fp8.predicted["kv_capacity_tokens"] == 319 * 32
        blocks = levers["kv-blocks"]
        assert blocks.predicted["kv_usage_ratio"] <= 0.9
        assert blocks.predicted["preemption_per_s"] == 0
        assert blocks.before["kv_demand_ratio"] > blocks.predicted["kv_demand_ratio"]
        # The memory utilization decides nothing on a server with an override.
        assert "gpu-memory-utilization" not in levers


def test_prefix_caching_is_switched_on_by_dropping_its_flag() -> None:
    (advised_changes,) = {
        advice.changes for d in diagnoses_of("prefix_off") for advice in d.recommendations
    }
    (change,) = advised_changes
    assert (change.flag, change.before, change.after) == ("--no-enable-prefix-caching", True, None)


def test_more_adapters_and_less_speculation() -> None:
    slots = [advice for d in diagnoses_of("lora_thrash") for advice in d.recommendations]
    assert all(change.before == 1 for advice in slots for change in advice.changes)
    assert max(advice.predicted["lora_max"] for advice in slots) == 4
    off = [advice for d in diagnoses_of("spec_bad") for advice in d.recommendations]
    assert {advice.before["draft_tokens"] for advice in off if advice.before} == {4}


def test_calls_that_clients_give_up_and_repeat_are_no_demand() -> None:
    """16 calls/s of 38 clients that hang up after 2 s are not the load of 79 replicas."""
    advised = [each for d in diagnoses(LAB / "hang_ups.jsonl.gz") for each in d.recommendations]
    assert {change.after for each in advised for change in each.changes} == {3}
    for each in advised:
        assert "the number that the load needs is unknown" in each.summary
        assert "load_ratio" not in each.predicted
        assert each.suffices is None


def test_a_size_stays_that_of_the_load_it_was_made_for() -> None:
    """The queue of the few seats is gone, and 5 requests instead of 6 run: the advice is for 6."""
    advised = [each for d in diagnoses(LAB / "few_seats.jsonl.gz") for each in d.recommendations]
    changes = [c for each in advised if each.id == "max-num-seqs-up" for c in each.changes]
    assert {change.before for change in changes} == {6}


def test_callers_get_a_seat_each_once_they_are_known() -> None:
    """40 clients send their next request when the last is answered, and the KV cache is empty."""
    shown = diagnoses(LAB / "few_seats.jsonl.gz", window_s=WINDOW_S)
    advised = [each for d in shown for each in d.recommendations if each.id == "max-num-seqs-up"]
    last = advised[-1]
    assert (last.changes[0].after, last.suffices) == (40, True)
    assert "40 clients send their next request" in last.summary


def test_figures_are_those_of_the_incident_once_a_window_lies_in_it() -> None:
    """The first window reaches back into quiet times: 41% of the KV cache; it was 95% full after
    it. Fewer are asked then, which must not hold the figures of before."""
    shown = diagnoses(LAB / "other_model.jsonl.gz", window_s=WINDOW_S)
    advised = [d for d in shown if d.recommendations]
    first_s = advised[0].t_s
    usages = {
        each.before["kv_usage_ratio"]
        for d in advised
        if d.t_s >= first_s + WINDOW_S
        for each in d.recommendations
        if "kv_usage_ratio" in each.before
    }
    assert usages
    assert min(usages) > 0.9


@pytest.mark.parametrize("name", ["healthy_light", "idle", "itl_smooth_chunked", "spec_good"])
def test_nothing_to_change_on_a_healthy_server(name: str) -> None:
    assert not any(diagnosis.recommendations for diagnosis in diagnoses_of(name))
