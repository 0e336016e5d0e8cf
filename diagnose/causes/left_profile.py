"""Requests that left the workload that the size was computed for: guide 9.1. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.drift import FALSE_ALARM, Departure, more_than_chance
from kneewatch.diagnose.stated_workload import KEYS, RATE_MIN, WORDS
from kneewatch.diagnose.workload_watch import RATE, SHIFTS, LiveWorkload
from kneewatch.rules.model import Severity

NAMES = ("p50", "p95", "p99")


def workload_drift(facts: Facts) -> Cause | None:
    """Lengths of prompts or answers, or a rate held, that are not the stated profile's."""
    live = facts.workload
    if live is None:
        return None
    # The signals are looked at, so that turning them back tells what the cause hangs on.
    moved = {
        side: replace(one, shift_ratio=copysign(facts.get(SHIFTS[side]), one.shift_ratio))
        for side, one in live.lengths.items()
    }
    left = {side: one for side, one in moved.items() if one.real}
    rate = facts.get(RATE)
    more = rate >= RATE_MIN and more_than_chance(rate * live.expected, live.expected)
    if not left and not more:
        return None
    case = Case(
        "workload_drift",
        "The workload left the profile that the size was computed for: "
        f"{told_of(left, rate if more else None)}.",
        _lever(live, tuple(left), more=more),
        ("9.1",),
        Severity.INFO,
        log_odds=0.4,
    )
    when = _span(live.span_s)
    for side, one in left.items():
        text = departure_words(one, WORDS[side], when)
        case.weigh(SHIFTS[side], abs(one.shift_ratio), one.least_ratio, 1.2, text)
    if more:
        text = (
            f"{live.requests / live.span_s:.3g} requests/s over {when}; its share of the peak "
            f"in {live.origin} is {live.expected / live.span_s:.3g}"
        )
        case.weigh(RATE, rate, RATE_MIN, 1.2, text)
    return case.close()


def told_of(left: Mapping[str, Departure], rate: float | None) -> str:
    """In a few words, what left the profile: lengths by side, and the rate over the stated peak."""
    told: list[str] = []
    for word, longer in (("longer", True), ("shorter", False)):
        sides = [WORDS[side] for side, one in left.items() if (one.shift_ratio > 0) == longer]
        told += [f"{' and '.join(sides)} are {word}"] if sides else []
    told += [] if rate is None else [f"arrivals are {rate:.1f} times its peak"]
    return ", ".join(told)


def departure_words(one: Departure, what: str, when: str) -> str:
    """What is seen, what is stated, and what chance may make of it."""
    longer = one.shift_ratio > 0
    tokens = one.point.most if longer else one.point.least
    return (
        f"{100 * one.seen_ratio:.0f} % of the {what} of {when} are "
        f"{'above' if longer else 'at or below'} {one.edge:g} tokens, where the profile has "
        f"{100 * one.may_ratio:.0f} % {'above' if longer else 'below'} its "
        f"P{100 * one.point.ratio:.0f} of {tokens:g}; chance adds {100 * one.chance_ratio:.0f} % "
        f"at most but once in {1 / FALSE_ALARM:,.0f}"
    )


def _span(span_s: float) -> str:
    return f"{span_s:.0f} s" if span_s < 120 else f"{span_s / 60:.0f} min"


def _lever(live: LiveWorkload, sides: Sequence[str], *, more: bool) -> str:
    anew = [
        f"{KEYS[side]}_{name}_tokens = {_rounded(tokens)}"
        for side in sides
        for name, tokens in zip(NAMES, live.live[side], strict=True)
        if tokens is not None and not live.grown
    ]
    anew += ["the lengths of a session's first call measured anew"] if sides and live.grown else []
    anew += ["peak_requests_per_s of a week measured anew"] if more else []
    return f"Size again: kneewatch size --plan {live.origin}, in it {', '.join(anew)}."


def _rounded(tokens: float) -> str:
    """To two digits: within a bucket nobody knows more."""
    return f"{float(f'{tokens:.2g}'):.0f}"


WORKLOAD_DRIFT = CauseRecord(
    id="workload_drift",
    title="Workload left its profile",
    means="Lengths of prompts or answers, or a rate, are not the stated profile's.",
    judge=workload_drift,
    fleet=True,
    sidecar="the profile that the size was computed for (workload_profile) is no series",
)
