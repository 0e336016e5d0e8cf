"""Recommendations over time: held while nothing moves, never taken back at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value
from kneewatch.diagnose.recommend.adviser import Adviser
from kneewatch.diagnose.recommend.past_advice import (
    HELD_S,
    LAPSED_S,
    AdviceTracker,
)
from tests.diagnose.recommend.scenes import FULL, PAGE, cause
from tests.diagnose.situations import NOW_S, Situation

PRESSURE = [cause("kv_pressure")]
PINNED = FULL.but(
    running=88.0, running_avg=88.0, running_max=88.0, kv_usage_avg_ratio=0.5, waiting=72.0,
    waiting_avg=72.0, waiting_by_capacity=72.0, prompt_tokens_mean=500.0, output_tokens_mean=300.0,
)  # fmt: skip


def recommended(flag: str, before: Value, after: Value) -> Advice:
    change = FlagChange(flag, before, after)
    return Advice(
        id="x", cause="kv_pressure", changes=(change,), summary="", predicted={},
        cost_usd_per_hour=0.0, checks=(), risk="", verify=(), guide=(),
    )  # fmt: skip


def followed(flag: str, before: Value, after: Value, **labels: str) -> AdviceTracker:
    tracker = AdviceTracker()
    tracker.advised(NOW_S, [recommended(flag, before, after)], requests=100.0)
    tracker.restarted(NOW_S + 60, labels)
    return tracker


def allowed(tracker: AdviceTracker, again: Advice, *, at_s: float, requests: float = 100.0) -> bool:
    return bool(tracker.allowed(at_s, [again], requests=requests))


@pytest.mark.parametrize(
    ("flag", "before", "after", "labels"),
    [
        ("--num-gpu-blocks-override", 160, 960, {"num_gpu_blocks_override": "960"}),
        ("--gpu-memory-utilization", 0.9, 0.95, {"gpu_memory_utilization": "0.95"}),
        ("--kv-cache-dtype", "fp8", "auto", {"cache_dtype": "auto"}),
        ("--max-num-seqs", 128, 64, {}),  # not on the page: taken as followed
    ],
)
def test_what_was_followed_is_not_reversed(
    flag: str, before: Value, after: Value, labels: dict[str, str]
) -> None:
    tracker = followed(flag, before, after, **labels)
    back, on = recommended(flag, after, before), recommended(flag, before, after)
    assert not allowed(tracker, back, at_s=NOW_S + 600)
    assert allowed(tracker, on, at_s=NOW_S + 600)
    assert allowed(tracker, back, at_s=NOW_S + 61 + HELD_S)
    assert allowed(tracker, back, at_s=NOW_S + 600, requests=151.0)  # another load


def test_what_was_not_followed_may_be_said_again() -> None:
    tracker = followed("--num-gpu-blocks-override", 160, 960, num_gpu_blocks_override="160")
    assert allowed(tracker, recommended("--num-gpu-blocks-override", 960, 160), at_s=NOW_S + 600)


def test_a_crash_without_a_change_is_no_answer() -> None:
    for flag, refused in (("--max-num-batched-tokens", False), ("--max-num-seqs", True)):
        tracker = AdviceTracker()
        tracker.advised(NOW_S, [recommended(flag, 128, 64)], requests=100.0)
        tracker.restarted(NOW_S + 60, PAGE, before=PAGE)
        assert allowed(tracker, recommended(flag, 64, 128), at_s=NOW_S + 90) is not refused
        # A batch above the seats that were advised: nobody set them.
        back = [recommended(flag, 64, 128)]
        assert tracker.allowed(NOW_S + 90, back, requests=100.0, running=100.0)


def test_both_names_of_a_switch_are_one() -> None:
    tracker = followed("--no-enable-prefix-caching", True, None, enable_prefix_caching="True")
    assert not allowed(
        tracker, recommended("--enable-prefix-caching", True, False), at_s=NOW_S + 90
    )


def test_a_restart_long_after_is_no_answer() -> None:
    tracker = AdviceTracker()
    tracker.advised(NOW_S, [recommended("--max-num-seqs", 128, 64)], requests=100.0)
    tracker.restarted(NOW_S + LAPSED_S + 1, {})
    assert allowed(tracker, recommended("--max-num-seqs", 64, 128), at_s=NOW_S + LAPSED_S + 2)


def at(situation: Situation, seconds: float, **labels: str) -> Facts:
    facts = replace(situation, config={**PAGE, **labels}).facts()
    return replace(facts, now_s=NOW_S + seconds)


def ids(recommendations: tuple[Advice, ...]) -> list[str]:
    return [advice.id for advice in recommendations]


def test_seats_that_were_lowered_are_not_raised_after_the_restart() -> None:
    adviser = Adviser()
    assert "max-num-seqs-down" in ids(adviser.advise(at(FULL, 0), PRESSURE))
    adviser.restarted()
    limited = [cause("admission_limit")]
    recommendations = adviser.advise(at(PINNED, 60), limited)
    assert "max-num-seqs-up" not in ids(recommendations)
    assert "max-num-seqs-up" in ids(Adviser().advise(at(PINNED, 60), limited))


def test_numbers_do_not_flicker_with_the_load() -> None:
    adviser = Adviser()
    first = adviser.advise(at(FULL, 0), PRESSURE)
    little = FULL.but(waiting_avg=70.0, waiting=70.0, waiting_by_capacity=70.0)
    assert adviser.advise(at(little, 2), PRESSURE) is first
    much = FULL.but(running=150.0, running_avg=150.0, running_max=150.0)
    assert adviser.advise(at(much, 60), PRESSURE) != first


def test_nothing_is_recommended_without_a_cause() -> None:
    adviser = Adviser()
    assert adviser.advise(at(FULL, 0), PRESSURE)
    assert adviser.advise(at(FULL, 2), []) == ()
    assert adviser.advise(at(FULL, 4), [cause("engine_restarted")]) == ()
