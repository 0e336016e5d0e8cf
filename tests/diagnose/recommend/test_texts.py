"""Sentences of recommendations have the numbers of their document, and contradict nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import ADVISED, FULL, LLAMA, advised, changes
from tests.diagnose.situations import Situation
from tests.examples import examples
from tests.recordings import CAPTURES, diagnoses

NEEDS = re.compile(r"at ([\d.]+)x the rate|take ([\d.]+)x the KV cache")
TOTAL = re.compile(r"it needs (?:\d+, or )?(\d+) with a safety factor")
COUNTED = re.compile(r"([\d,]+) requests wait")
HELD = re.compile(r"of ([\d,]+) tokens holds ([\d.]+) requests of the present mean size \(([\d,]+)")
TIMES = re.compile(r"hold (?:up to )?([\d.]+)x as many")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def wrong(advice: Recommendation, targets: Targets) -> Iterator[str]:
    """What a recommendation's sentences say that its numbers do not."""
    words, before, then = advice.summary, advice.before, advice.predicted
    if (said := NEEDS.search(words)) and advice.changes:
        ratio = before["load_ratio"]
        (now, total) = changes(advice)["replicas"]
        assert isinstance(now, int)
        assert isinstance(total, int)
        if number(said[1] or said[2]) != pytest.approx(ratio, rel=0.06):
            yield "the ratio"
        needed = TOTAL.search(words)
        if needed is None or int(needed[1]) != ceil(round(now * ratio * SAFETY_DEFAULT, 6)):
            yield "the number that it needs"
        elif int(needed[1]) != total and "recommended before" not in words:
            yield "the change"
        elif int(needed[1]) <= now and "recommended before" not in words:
            yield "more replicas than the load needs"
        if then["load_ratio"] != pytest.approx(ratio * now / total, rel=2e-3):
            yield "the ratio after the change"
    backlog = pytest.approx(then.get("backlog_requests", 0.0), rel=1e-3, abs=0.6)
    if (said := COUNTED.search(words)) and number(said[1]) != backlog:
        yield "the backlog"
    if said := HELD.search(words):
        tokens, fits, mean = map(number, said.groups())
        if fits != pytest.approx(tokens / mean, rel=0.01, abs=0.1):
            yield "the requests that fit"
    if (said := TIMES.search(words)) and number(said[1]) != pytest.approx(
        then["kv_capacity_ratio"], abs=0.06
    ):
        yield "the larger cache"
    if then.get("preemption_per_s") == 0 and "still preempt" in words:
        yield "preemptions"
    itl_s, target_s = then.get("itl_s"), targets.itl_p99_s
    if (
        itl_s
        and target_s
        and before.get("itl_s")
        and itl_s > target_s
        and "still missed" not in words
    ):
        yield "an ITL target that stays missed"


def contradictions(recommendations: dict[str, Recommendation]) -> Iterator[str]:
    """Flags that two recommendations against one cause change in opposite directions."""
    ids = recommendations.keys()
    for pair in (
        {"max-num-seqs-up", "max-num-seqs-down"},
        {"spec-off", "spec-shorter"},
        {"spec-off", "spec-watch"},
        {"spec-on", "spec-off"},
        {"replicas", "fewer-replicas"},
    ):
        causes = {recommendations[each].cause for each in pair & ids}
        if pair <= ids and len(causes) == 1:
            yield " and ".join(sorted(pair))


@examples(1000)
@given(
    cause_id=st.sampled_from(ADVISED),
    running=st.floats(1, 300),
    waiting=st.floats(0, 3000),
    growth_per_s=st.sampled_from([-2.0, -0.3, 0.0, 0.05, 0.8, 6.0]),
    usage=st.floats(0.05, 1.0),
    prompt=st.floats(20, 20_000),
    target_s=st.sampled_from([None, 0.02, 0.2]),
    replicas=st.sampled_from([None, 1, 2, 9]),
    is_known=st.booleans(),
    fixed=st.sampled_from([{}, {"num_gpu_blocks_override": "10001"},
                           {"kv_cache_memory_bytes": "20000000000"}]),
)  # fmt: skip
def test_random_loads(
    cause_id: str, running: float, waiting: float, growth_per_s: float, usage: float,
    prompt: float, target_s: float | None, replicas: int | None, *, is_known: bool,
    fixed: dict[str, Any],
) -> None:  # fmt: skip
    situation: Situation = FULL.but(
        running=running, running_avg=running, running_max=running, waiting=waiting,
        waiting_avg=waiting, waiting_by_capacity=waiting, waiting_slope_per_s=growth_per_s,
        kv_usage_avg_ratio=usage, prompt_tokens_mean=prompt, prompt_tokens_p99=2 * prompt,
        itl_p99_s=0.09, ttft_p99_s=9.0, spec_acceptance_ratio=0.1, spec_draft_tokens_per_s=40.0,
        spec_accepted_per_draft_tokens=0.4,
    )  # fmt: skip
    targets = Targets(itl_p99_s=target_s)
    stated = replace(LLAMA if is_known else Stated(version=(0, 32, 0)), replicas=replicas)
    levers = advised(
        cause_id, situation=replace(situation, targets=targets), stated=stated, **fixed
    )
    assert [(each.id, what) for each in levers.values() for what in wrong(each, targets)] == []
    assert [*contradictions(levers)] == []
    for each in levers.values():
        if fixed and each.id == "fp8-weights":
            assert "stays unused" in each.summary


@pytest.mark.parametrize(
    "name", ["kv_pressure_cascade", "queue_overload", "spec_bad", "spec_mixed", "prefix_churn"]
)
def test_recordings(name: str) -> None:
    told: list[Verdict] = diagnoses(CAPTURES / f"{name}.jsonl.gz")
    for verdict in told:
        by_id = {advice.id: advice for advice in verdict.recommendations}
        assert [*contradictions(by_id)] == []
        assert [(each.id, what) for each in by_id.values() for what in wrong(each, Targets())] == []


def test_a_target_that_stays_missed_is_named() -> None:
    situation = replace(FULL.but(itl_p99_s=0.09), targets=Targets(itl_p99_s=0.02))
    advice = advised("kv_pressure", situation=situation, stated=LLAMA)["replicas"]
    assert "does not mend the ITL P99 target of 20 ms: still missed" in advice.summary


def test_no_replicas_where_the_arithmetic_needs_none() -> None:
    """A third of the KV cache of two replicas: 0.34 x 2 x 1.3 is less than one replica."""
    little = FULL.but(running=20.0, running_avg=20.0, running_max=20.0, waiting=2.0,
                      waiting_avg=2.0, waiting_by_capacity=2.0, kv_usage_avg_ratio=0.2)  # fmt: skip
    assert "replicas" not in advised("kv_pressure", situation=little, stated=LLAMA)
