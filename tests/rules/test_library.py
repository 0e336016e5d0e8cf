"""What holds for every rule of the library, and whose thresholds count."""

from __future__ import annotations

import re

import pytest

from kneewatch.collector.signals.table import GPU_SIGNALS, VLLM_SIGNALS, configured
from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    FILLING_FROM_RATIO,
    PREEMPTIONS_MIN,
)
from kneewatch.rules.library import RULES, RULES_BY_ID, slo_rules, with_thresholds
from kneewatch.rules.lifecycle import RuleState
from kneewatch.rules.rule import Bound, Rule, Severity
from tests.reference_pages import DERIVED_HELP
from tests.rules.judged import ALL, BY_BOUND, BY_ID

SIGNALS = {
    signal.key
    for signal in (
        *VLLM_SIGNALS,
        *GPU_SIGNALS,
        *configured(ttft_slo_s=1.0, gpus=8, peak_flop_per_s=1e15, peak_bytes_per_s=3e12),
    )
} | DERIVED_HELP.keys()
SECTION = re.compile(r"\b\d\.\d\b")


# The catalogue


def test_rule_ids_are_unique_and_stable_words() -> None:
    ids = [rule.id for rule in ALL]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[A-Z]+(-[A-Z0-9]+)*", rule_id) for rule_id in ids)


def test_what_the_user_does_not_state_makes_no_rule() -> None:
    assert slo_rules(ttft_p99_s=None, itl_p99_s=None) == ()
    assert [rule.id for rule in slo_rules(ttft_p99_s=1.0, itl_p99_s=None)] == [
        *("TTFT-P99", "TTFT-P50")
    ]
    late = {"benchmark.ttft_p99_s": 2.0}
    assert slo_rules(ttft_p99_s=None, itl_p99_s=None, benchmark=late) == ()


@pytest.mark.parametrize(
    ("arrival_per_s", "state"), [(7.9, "ok"), (8.1, "info"), (11.9, "info"), (12.1, "ok")]
)
def test_a_benchmark_is_compared_at_its_load(arrival_per_s: float, state: str) -> None:
    stated = {"benchmark.ttft_p99_s": 2.0, "benchmark.requests_per_s": 10.0}
    (bench,) = slo_rules(ttft_p99_s=None, itl_p99_s=None, benchmark=stated)
    assert bench.id == "BENCH-TTFT"
    assert bench.bounds[0].threshold == pytest.approx(2.6)
    judged = RuleState(bench, scale=1.0)
    values = {"ttft_p99_s": 2.7, "arrival_per_s": arrival_per_s}
    findings = [judged.judge(at_s, values, {}, {}, idle=False) for at_s in (0.0, 301.0)]
    assert findings[-1].state == state


def test_rules_and_cascade_agree_on_full_and_evicting() -> None:
    evicts, full = RULES_BY_ID["KV-EVICT"], RULES_BY_ID["KV-FULL"]
    assert evicts.threshold(Severity.WARNING) == EVICT_WARNING_PER_S
    assert evicts.threshold(Severity.CRITICAL) == EVICT_CRITICAL_PER_S
    assert PREEMPTIONS_MIN in {guard.value for guard in evicts.guards}
    assert full.threshold(Severity.INFO) == FILLING_FROM_RATIO


@BY_ID
def test_a_rule_reads_signals_that_exist(rule: Rule) -> None:
    assert rule.signal in SIGNALS
    assert {guard.signal for guard in rule.guards} <= SIGNALS
    assert rule.signal not in {guard.signal for guard in rule.guards}


@BY_ID
def test_a_rule_cites_the_guide_and_says_what_to_do(rule: Rule) -> None:
    assert rule.guide, "which section of the guide?"
    assert all(SECTION.fullmatch(section) for section in rule.guide)
    for bound in rule.bounds:
        assert bound.source, "why this bound?"
        assert "guide" not in bound.source, "readers do not have its text"
    assert rule.summary
    assert not rule.summary.endswith(".")
    assert rule.advice.endswith(".")


@BY_ID
def test_a_worse_bound_lies_further_out(rule: Rule) -> None:
    assert rule.bounds
    order = sorted(rule.bounds, key=lambda bound: bound.severity)
    thresholds = [bound.threshold for bound in order]
    assert thresholds == sorted(set(thresholds), reverse=rule.below)
    assert list(rule.bounds) == order
    assert Severity.OK not in {bound.severity for bound in rule.bounds}
    assert rule.for_s >= 0
    assert rule.clear_s > 0


# The user's thresholds


@BY_BOUND
def test_every_threshold_can_be_set(rule: Rule, bound: Bound) -> None:
    changed = with_thresholds(ALL, {rule.id: {bound.severity.word: 0.125}}, "kneewatch.toml")
    assert [r.id for r in changed] == [r.id for r in ALL]
    mine = {b.severity: b for b in next(r for r in changed if r.id == rule.id).bounds}
    assert mine[bound.severity] == Bound(bound.severity, 0.125, "kneewatch.toml")
    others = [(r, c) for r, c in zip(ALL, changed, strict=True) if r.id != rule.id]
    assert all(ours == same for ours, same in others)
    assert {b for b in rule.bounds if b.severity != bound.severity} <= set(mine.values())


def test_a_severity_that_a_rule_does_not_have_can_be_added() -> None:
    (queue,) = (rule for rule in RULES if rule.id == "QUEUE-GROWS")
    (changed,) = with_thresholds((queue,), {"QUEUE-GROWS": {"info": 0.01}}, "x")
    assert [(b.severity, b.threshold) for b in changed.bounds] == [
        *((Severity.INFO, 0.01), (Severity.WARNING, 0.1))
    ]
    assert changed.level(0.05) == Severity.INFO
