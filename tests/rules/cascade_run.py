"""One cascade under a clock, on a healthy load that tests make unhealthy."""

from __future__ import annotations

from kneewatch.rules.cascade import Stage
from kneewatch.rules.facts import Targets
from kneewatch.rules.library import RULES
from kneewatch.rules.lifecycle import Cascade

KV_EVICT = next(rule for rule in RULES if rule.id == "KV-EVICT")
START_S = 1_795_000_000.0
LOAD: dict[str, float | None] = {
    "kv_usage_ratio": 0.6,
    "kv_usage_slope_per_s": 0.0,
    "running": 20.0,
    "waiting": 0.0,
    "waiting_by_capacity": 0.0,
    "running_avg": 20.0,
    "waiting_avg": 0.0,
    "preemption_ratio_per_s": 0.0,
    "ttft_p99_s": 0.3,
    "ttft_p99_drift_ratio": 1.0,
    "generation_tokens_per_s": 1_000.0,
}
"""A healthy load; tests say what is different."""

FULL = {"kv_usage_ratio": 0.99}
QUEUE = {**FULL, "waiting_by_capacity": 5.0, "waiting": 5.0, "waiting_avg": 5.0}


class Run:
    """One cascade under a clock that starts at zero; each step is a scrape."""

    def __init__(self, *, scale: float = 1.0, ttft_slo_s: float | None = None) -> None:
        self._cascade = Cascade(
            scale=scale, targets=Targets(ttft_p99_s=ttft_slo_s), evicting=KV_EVICT
        )

    def at(self, t_s: float, preempted: float = 0.0, **values: float | None) -> Stage:
        """The stage at a time."""
        return self._cascade.judge(START_S + t_s, {**LOAD, **values}, preempted=preempted)

    def numbers(self, *steps: tuple[float, float, dict[str, float]]) -> list[int]:
        """The stages after several scrapes: (time, preempted, what is different)."""
        return [self.at(t_s, preempted, **values).level for t_s, preempted, values in steps]

    def forget(self) -> None:
        """The process was replaced."""
        self._cascade.forget()
