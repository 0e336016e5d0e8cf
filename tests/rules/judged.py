"""All rules as test cases, and one rule under a clock."""

from __future__ import annotations

import math

import pytest

from kneewatch.rules.library import RULES, slo_rules
from kneewatch.rules.lifecycle import RuleState
from kneewatch.rules.rule import Bound, Finding, Rule, Severity

ALL = (
    *RULES,
    *slo_rules(
        ttft_p99_s=2.0,
        itl_p99_s=0.2,
        benchmark={
            "benchmark.requests_per_s": 2.0,
            "benchmark.ttft_p99_s": 1.0,
            "benchmark.itl_p99_s": 0.1,
            "benchmark.gpu_ratio": 0.7,
        },
    ),
)
BY_ID = pytest.mark.parametrize("rule", ALL, ids=[rule.id for rule in ALL])
BOUNDS = [(rule, bound) for rule in ALL for bound in rule.bounds]
BY_BOUND = pytest.mark.parametrize(
    ("rule", "bound"), BOUNDS, ids=[f"{rule.id} {bound.severity.word}" for rule, bound in BOUNDS]
)
START_S = 1_795_000_000.0


class Judge:
    """One rule under a clock that starts at zero, with its guards held unless values say other."""

    def __init__(self, rule: Rule, *, scale: float = 1.0) -> None:
        self.rule, self._state = rule, RuleState(rule, scale=scale)

    def at(self, t_s: float, value: float | None, **values: float | None) -> Finding:
        """The finding at a time."""
        guards = {guard.signal: guard.value for guard in self.rule.guards}
        seen = {**guards, **values, self.rule.signal: value}
        return self._state.judge(START_S + t_s, seen, {}, {}, idle=False)

    def forget(self) -> None:
        """Another process answers now."""
        self._state.forget()


def beyond(rule: Rule, bound: Bound) -> float:
    """The nearest value that crosses a bound."""
    return math.nextafter(bound.threshold, -math.inf if rule.below else math.inf)


def back(rule: Rule, bound: Bound, share: float) -> float:
    """A value back inside a bound by a share of it."""
    return bound.threshold * (1 + share if rule.below else 1 - share)


def milder(rule: Rule, bound: Bound) -> Severity:
    """The severity at a bound itself, which is not crossed yet."""
    return max(
        (b.severity for b in rule.bounds if b.severity < bound.severity), default=Severity.OK
    )
