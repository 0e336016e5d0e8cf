"""How the state of a rule begins and ends: thresholds, durations, guards, no flapping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.rules.lifecycle import RuleState
from kneewatch.rules.rule import Bound, Finding, Guard, Rule, Severity
from kneewatch.rules.wire import rounded
from tests.rules.judged import ALL, BY_BOUND, BY_ID, START_S, Judge, back, beyond, milder


def clearing(finding: Finding) -> tuple[float | None, float | None, Severity | None]:
    """Since when a state is clearing, its last value out of bounds, and its severity before."""
    return finding.clearing_since_s, finding.was, finding.was_severity


@BY_ID
def test_a_rule_is_unknown_without_data(rule: Rule) -> None:
    judged = RuleState(rule, scale=1.0)
    guards = {guard.signal: guard.value for guard in rule.guards}
    blank = {**guards, rule.signal: None}

    def state(
        values: Mapping[str, float | None], *, idle: bool = False, **given: dict[str, str]
    ) -> Finding:
        return judged.judge(START_S, values, {}, given.get("notes", {}), idle=idle)

    assert state({}).state == "unknown"
    assert state({}).missing == (rule.signal,)
    assert state(blank).state == "unknown"
    assert state(blank).note
    assert state(blank, idle=True, notes={rule.signal: "why"}).note == "why"
    assert state(blank, idle=True).state == "ok", "without requests there is nothing to observe"
    finding = judged.judge(START_S, blank, {rule.signal: ("metric",)}, {}, idle=True)
    assert (finding.state, finding.missing) == ("unknown", ("metric",))
    assert finding.severity == Severity.OK


@BY_BOUND
def test_a_rule_flips_at_its_threshold_once_it_was_crossed_for_long_enough(
    rule: Rule, bound: Bound
) -> None:
    at, over = bound.threshold, beyond(rule, bound)
    calm, judge = Judge(rule), Judge(rule)
    for t_s in (0.0, rule.for_s, 10 * rule.for_s + 1):
        finding = calm.at(t_s, at)
        assert finding.severity <= milder(rule, bound)
    if rule.for_s:
        assert judge.at(0.0, over).state == "ok"
        assert judge.at(rule.for_s - 0.5, over).state == "ok"
    finding = judge.at(rule.for_s, over)
    assert (finding.state, finding.severity) == (bound.severity.word, bound.severity)
    assert finding.value == rounded(over)
    assert finding.since_s == START_S


@BY_BOUND
def test_a_state_ends_only_a_tenth_back_and_after_a_while(rule: Rule, bound: Bound) -> None:
    judge = Judge(rule)
    judge.at(0.0, beyond(rule, bound))
    start_s = rule.for_s
    assert judge.at(start_s, beyond(rule, bound)).severity == bound.severity
    if rule.clear_ratio and bound.threshold:
        for t_s in (1.0, rule.clear_s, 20 * rule.clear_s):
            inside = judge.at(start_s + t_s, back(rule, bound, 0.9 * rule.clear_ratio))
            assert inside.severity == bound.severity, "not back by a tenth"
        start_s += 20 * rule.clear_s
    calm = back(rule, bound, 1.01 * rule.clear_ratio) if bound.threshold else 0.0
    assert judge.at(start_s + 1, calm).held == bound.severity
    assert judge.at(start_s + rule.clear_s + 0.5, calm).held == bound.severity
    ended = judge.at(start_s + rule.clear_s + 1, calm)
    assert ended.severity <= milder(rule, bound)
    if ended.severity == Severity.OK:
        assert ended.since_s is None


@pytest.mark.parametrize("scale", [0.25, 1.0, 5.0])
@BY_BOUND
def test_durations_stretch_with_the_window(rule: Rule, bound: Bound, scale: float) -> None:
    judge, over = Judge(rule, scale=scale), beyond(rule, bound)
    for_s, clear_s = rule.for_s * scale, rule.clear_s * scale
    if for_s:
        judge.at(0.0, over)
        assert judge.at(0.99 * for_s, over).state == "ok"
    assert judge.at(for_s, over).severity == bound.severity
    calm = back(rule, bound, 0.5) if bound.threshold else 0.0
    judge.at(for_s + 1, calm)
    assert judge.at(for_s + 1 + 0.99 * clear_s, calm).held == bound.severity
    assert judge.at(for_s + 1 + clear_s, calm).severity < bound.severity


@BY_BOUND
def test_an_input_that_flaps_makes_no_state_that_flaps(rule: Rule, bound: Bound) -> None:
    judge = Judge(rule)
    over = beyond(rule, bound)
    calm = back(rule, bound, 0.5) if bound.threshold else 0.0
    interval_s = min(rule.clear_s, rule.for_s or rule.clear_s) / 3
    seen = [judge.at(n * interval_s, over if n % 2 else calm).held for n in range(200)]
    if rule.for_s:
        assert max(seen) < bound.severity, "never crossed for long enough"
        return
    first = seen.index(bound.severity)
    assert set(seen[first:]) == {bound.severity}, "once begun it stays while the input flaps"


@BY_ID
def test_a_fired_rule_stays_while_its_input_flaps(rule: Rule) -> None:
    judge, bound = Judge(rule), rule.bounds[0]
    over, calm = beyond(rule, bound), back(rule, bound, 0.5) if bound.threshold else 0.0
    judge.at(0.0, over)
    judge.at(rule.for_s, over)
    interval_s = rule.clear_s / 3
    values = (over if n % 2 else calm for n in range(50))
    seen = {judge.at(rule.for_s + n * interval_s, v).held for n, v in enumerate(values, start=1)}
    assert seen == {bound.severity}


GUARDED = [rule for rule in ALL if rule.guards]


@pytest.mark.parametrize("rule", GUARDED, ids=[rule.id for rule in GUARDED])
@pytest.mark.parametrize("unknown", [False, True], ids=["guard not met", "guard unknown"])
def test_a_rule_is_not_judged_where_a_guard_does_not_hold(rule: Rule, *, unknown: bool) -> None:
    for guard in rule.guards:
        outside = math.nextafter(guard.value, math.inf if guard.below else -math.inf)
        judge, over = Judge(rule), beyond(rule, rule.bounds[-1])
        for t_s in (0.0, rule.for_s, 3 * rule.for_s + 1):
            finding = judge.at(t_s, over, **{guard.signal: None if unknown else outside})
            assert finding.state == "ok" or (unknown and guard.unknown)


@pytest.mark.parametrize(
    ("ends", "held"),
    [(False, Severity.WARNING), (True, Severity.OK)],
    ids=["after a while", "at once"],
)
def test_a_state_ends_with_its_guard(*, ends: bool, held: Severity) -> None:
    guard = Guard("stage", 2.0, "below stage 2", ends=ends)
    judge = Judge(replace(steps((Severity.WARNING, 10.0)), guards=(guard,)))
    judge.at(0.0, 15.0)
    assert judge.at(10.0, 15.0).state == "warning"
    assert judge.at(12.0, 15.0, stage=1.0).held == held
    assert judge.at(42.0, 15.0, stage=1.0).state == "ok"


def test_a_guard_may_hold_below_a_value() -> None:
    guard = Guard("x", 2.0, "x above 2", below=True)
    assert guard.holds({"x": 2.0})
    assert not guard.holds({"x": 2.1})
    assert not guard.holds({"x": None})
    assert replace(guard, unknown=True).holds({"x": None})


def steps(*bounds: tuple[Severity, float], for_s: float = 10.0) -> Rule:
    """A rule with nothing but bounds and durations."""
    return Rule(
        id="X",
        signal="x",
        bounds=tuple(Bound(severity, threshold, "test") for severity, threshold in bounds),
        summary="X",
        advice="X.",
        guide=("9.3",),
        for_s=for_s,
    )


def test_a_state_grows_worse_and_better_step_by_step_and_keeps_its_beginning() -> None:
    judge = Judge(steps((Severity.WARNING, 10.0), (Severity.CRITICAL, 20.0)))
    judge.at(0.0, 15.0)
    assert judge.at(10.0, 15.0).state == "warning"
    assert judge.at(20.0, 25.0).state == "warning", "the worse bound has its own duration"
    worse = judge.at(30.0, 25.0)
    assert (worse.state, worse.since_s) == ("critical", START_S)
    judge.at(40.0, 15.0)
    better = judge.at(70.0, 15.0)
    assert (better.state, better.since_s) == ("warning", START_S)
    judge.at(80.0, 1.0)
    assert judge.at(110.0, 1.0).state == "ok"
    judge.at(120.0, 15.0)
    again = judge.at(130.0, 15.0)
    assert (again.state, again.since_s) == ("warning", START_S + 120.0)


def test_a_state_that_only_its_clear_time_holds_is_told_as_over() -> None:
    judge = Judge(steps((Severity.WARNING, 10.0), (Severity.CRITICAL, 20.0)))
    judge.at(0.0, 50.0)
    finding = judge.at(10.0, 50.0)
    assert (finding.severity, finding.clearing_since_s) == (Severity.CRITICAL, None)
    milder = judge.at(12.0, 15.0)
    assert (milder.severity, milder.clearing_since_s) == (Severity.CRITICAL, None), (
        "still out of bounds"
    )
    for t_s in (14.0, 23.0):
        over = judge.at(t_s, 1.0)
        assert (over.state, over.severity, over.held) == ("info", Severity.INFO, Severity.CRITICAL)
        assert clearing(over) == (START_S + 14.0, 15.0, Severity.CRITICAL)
    again = judge.at(24.0, 25.0)
    assert (again.severity, again.clearing_since_s) == (Severity.CRITICAL, None)
    assert clearing(judge.at(26.0, 1.0)) == (START_S + 26.0, 25.0, Severity.CRITICAL)
    ended = judge.at(56.0, 1.0)
    assert (ended.state, ended.clearing_since_s) == ("ok", None)


def test_what_keeps_a_rule_quiet_over_its_bound_is_said() -> None:
    guard = Guard("requests", 3.0, "fewer than 3 requests")
    judge = Judge(replace(steps((Severity.INFO, 5.0), (Severity.WARNING, 10.0)), guards=(guard,)))
    assert judge.at(0.0, 15.0, requests=2.0).note == "not judged: fewer than 3 requests"
    assert judge.at(0.5, 15.0, requests=None).note == "not judged: requests is unknown"
    assert not judge.at(1.0, 7.0, requests=2.0).note, "no more than a note would be told"
    judge.at(2.0, 15.0)
    assert judge.at(6.0, 15.0).note == "out of bounds, reported if that lasts 10 s"
    assert not judge.at(12.0, 15.0).note
    assert judge.at(14.0, 15.0, requests=2.0).note, "also while it clears"


def test_a_new_process_begins_with_a_clean_sheet() -> None:
    judged = RuleState(steps((Severity.WARNING, 10.0)), scale=1.0)

    def state(t_s: float, value: float) -> str:
        return judged.judge(START_S + t_s, {"x": value}, {}, {}, idle=False).state

    assert [state(0.0, 15.0), state(10.0, 15.0)] == ["ok", "warning"]
    judged.forget()
    assert [state(12.0, 1.0), state(14.0, 15.0), state(23.9, 15.0)] == ["ok"] * 3
    assert state(24.0, 15.0) == "warning"


def test_zero_is_never_over_a_bound() -> None:
    assert steps((Severity.WARNING, 0.0)).level(0.0) == Severity.OK
    assert steps((Severity.WARNING, 0.0)).level(0.0, relax=0.5) == Severity.OK
    assert steps((Severity.WARNING, 0.0)).level(1e-9) == Severity.WARNING
