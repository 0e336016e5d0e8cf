"""Predicted beside measured: what counts as right, and where the numbers come from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.compared import Relation, Row, Run, compared, levers_apart, table, unread
from tests.lab.diagnosed import Said
from tests.lab.faults import FAULTS
from tests.lab.load import Arrival, Seen, longest_wait_s
from tests.lab.resize import followed, wrong


def run(*causes: str, seats: int | None = None, longest_s: float = 0.1, **signals: float) -> Run:
    """A run in which kneewatch saw these signals and named these causes."""
    named = [{"id": cause, "severity": "warning"} for cause in causes]
    document = {"signals": signals, "causes": named, "health": "ok", "stage": {"number": 0}}
    said = Said(0, "", "", document)
    return Run(said, said, Seen(10, 0.1, 0.02, longest_s), seats)


def recommended(lever: str, predicted: dict[str, float], **before: float) -> dict[str, Any]:
    """A recommendation as it stands in kneewatch's documents."""
    return {"id": lever, "before": before, "predicted": predicted, "changes": []}


@pytest.mark.parametrize(
    ("predicted", "measured", "relation", "near", "verdict"),
    [
        pytest.param(0.8, 0.9, "is", 0.0, "right", id="12 % off"),
        pytest.param(0.8, 0.6, "is", 0.0, "off by -25%", id="25 % off"),
        pytest.param(0.8, 0.3, "is", 0.0, "GROSSLY off by -62%", id="62 % off"),
        pytest.param(0.0, 0.04, "is", 0.05, "right", id="near nothing"),
        pytest.param(0.0, 0.4, "is", 0.05, "GROSSLY off by +0.4", id="not nothing"),
        pytest.param(0.02, 0.01, "at most", 0.0, "right", id="less than at most"),
        pytest.param(0.02, 0.03, "at most", 0.0, "off by +50%", id="more than at most"),
        pytest.param(0.02, 0.95, "at least", 0.0, "right", id="more than at least"),
        pytest.param(0.02, 0.0, "at least", 0.0, "GROSSLY off by -100%", id="none"),
        pytest.param(0.8, None, "is", 0.0, "NOT MEASURED", id="not measured"),
        pytest.param(None, 0.8, "is", 0.0, "not predicted", id="not predicted"),
    ],
)
def test_verdict(
    predicted: float | None, measured: float | None, relation: Relation, near: float, verdict: str
) -> None:
    row = Row(
        what="x", before=None, predicted=predicted, measured=measured, near=near, relation=relation
    )
    assert row.verdict == verdict
    assert row.gross is verdict.startswith(("GROSSLY", "NOT"))


def rows(recommendation: dict[str, Any], before: Run, after: Run) -> dict[str, Row]:
    """The rows by what they are about."""
    return {row.what: row for row in compared(recommendation, before, after)}


def test_room_for_all_who_waited() -> None:
    recommendation = recommended("kv-blocks", {"max_concurrency": 40, "kv_usage_ratio": 0.8})
    before = run(running_avg=20.0, waiting_avg=10.0, kv_usage_avg_ratio=1.0)
    after = run(running_avg=30.0, waiting_avg=0.0, kv_usage_avg_ratio=0.75)
    row_of = rows(recommendation, before, after)
    assert row_of["running, mean"].predicted == 30  # 20 + 10 of at most 40
    assert row_of["requests that fit at once"].measured == pytest.approx(40)  # 30 / 0.75
    assert row_of["KV usage, mean"].right


def test_seats_limit_what_fits() -> None:
    recommendation = recommended("max-num-seqs-down", {"max_concurrency": 18})
    before = run(running_avg=20.0, waiting_avg=10.0, kv_usage_avg_ratio=1.0)
    row_of = rows(recommendation, before, run(seats=18, running_avg=18.0, kv_usage_avg_ratio=0.9))
    assert row_of["requests that fit at once"].measured == 18  # not 18 / 0.9
    assert row_of["running, mean"].predicted == 18


@pytest.mark.parametrize(
    ("measured_s", "verdict"),
    [(0.31, "right"), (0.59, "right"), (0.74, "off by +85%"), (0.9, "GROSSLY off by +125%")],
)
def test_a_p99_is_right_in_the_band_that_was_stated(measured_s: float, verdict: str) -> None:
    band = {"ttft_p99_s": 0.4, "ttft_p99_low_s": 0.3, "ttft_p99_high_s": 0.6}
    before = run(ttft_p99_s=2.0, itl_p99_s=0.1)
    row_of = rows(recommended("replicas", band), before, run(ttft_p99_s=measured_s, itl_p99_s=0.1))
    assert row_of["TTFT, P99, s"].verdict == verdict
    assert row_of["ITL, P99, s"].verdict == "not predicted"
    assert "0.4 (0.3 to 0.6)" in table(list(row_of.values()))[2]


def test_prefill_falls_to_a_step_by_the_hits() -> None:
    before = run(prefill_mean_s=0.31, itl_p50_s=0.01)
    after = run(prefill_mean_s=0.04, prefix_hit_ratio=0.9)
    row_of = rows(recommended("prefix-caching", {}), before, after)
    # 0.01 + (0.31 - 0.01) x (1 - 0.9)
    assert row_of["prefill, mean, s (by the hits)"].predicted == pytest.approx(0.04)
    assert row_of["prefix hit ratio"].right


def test_without_speculation_tokens_come_no_slower_than_it_was_worth() -> None:
    recommendation = recommended(
        "spec-off",
        {"draft_tokens": 0, "speedup_at_most_ratio": 1.0},
        speedup_at_most_ratio=1.2,
    )
    before = run(tpot_mean_s=0.010, spec_draft_tokens_per_s=500.0)
    row_of = rows(recommendation, before, run(tpot_mean_s=0.013))
    assert row_of["TPOT, mean, s"].predicted == pytest.approx(0.012)  # 0.010 x 1.2
    assert row_of["TPOT, mean, s"].right  # 8 % more
    assert row_of["drafted tokens per s"].right
    assert not rows(recommendation, before, run(tpot_mean_s=0.015))["TPOT, mean, s"].right


def test_a_cause_that_is_still_named_is_wrong() -> None:
    after = run("kv_pressure")
    assert wrong(FAULTS[0], after, []) == ["the cause is still named"]
    missed = Row(what="KV usage", before=1.0, predicted=0.4, measured=0.9)
    assert wrong(FAULTS[0], run(), [missed]) == ["KV usage: GROSSLY off by +125%"]


def test_what_a_cpu_cannot_follow_is_skipped() -> None:
    first, second = recommended("kv-fp8", {}), recommended("max-num-seqs-down", {})
    recommendation, skipped = followed([first, second], FAULTS[0])
    assert recommendation is second
    assert skipped == ["kv-fp8, as the CPU backend has no FP8 KV cache"]
    assert followed([first], FAULTS[0])[0] is None


def diagnosis(recommendation: str, flag: str, to: int, facts: tuple[str, ...] = ()) -> Said:
    """A diagnosis of full KV memory, with its first recommendation and the facts' names."""
    change = {"flag": flag, "from": 160, "to": to}
    document = {
        "causes": [{"id": "kv_pressure", "severity": "critical"}],
        "recommendations": [{"id": recommendation, "changes": [change]}],
        "server": {"facts": [{"name": name} for name in facts]},
    }
    return Said(1, "", "", document)


def test_the_first_lever_is_compared_by_its_flags() -> None:
    stated = diagnosis("kv-blocks", "--num-gpu-blocks-override", 352)
    assert levers_apart(stated, diagnosis("kv-blocks", "--num-gpu-blocks-override", 350)) == []
    (complaint,) = levers_apart(stated, diagnosis("max-num-seqs-down", "--max-num-seqs", 14))
    assert "kv_pressure: max-num-seqs-down, --max-num-seqs 160 -> 14" in complaint
    assert levers_apart(stated, Said(2, "", "", {})) != []


def test_facts_that_were_not_read_are_named() -> None:
    everything = ("vllm_version", "model", "max_num_seqs", "kv_cache_size_tokens")
    assert unread(diagnosis("kv-blocks", "--x", 1, everything)) == []
    assert unread(diagnosis("kv-blocks", "--x", 1, everything[1:])) == [
        "with no settings: vllm_version is unknown"
    ]
    assert len(unread(Said(2, "", "", {}))) == 4


def test_what_was_only_shown_has_no_verdict() -> None:
    lines = table(compared(recommended("x", {}), run(ttft_mean_s=0.5), run(ttft_mean_s=0.25)))
    assert lines[2] == "| TTFT, mean, s | 0.5 | - | 0.25 | not predicted |"


def test_the_longest_wait_is_no_single_one() -> None:
    steps = [Arrival(0.0, 0.1, 1)] * 90
    assert longest_wait_s([*steps, Arrival(0.0, 0.4, 1)]) == 0.1  # 0.4 of 9.4 s
    assert longest_wait_s([*steps, *[Arrival(0.0, 0.4, 1)] * 3]) == 0.4  # 1.2 of 10.2 s
    assert longest_wait_s([]) is None
