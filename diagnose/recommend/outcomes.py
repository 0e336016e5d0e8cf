"""The outcome of a recommendation: whether it was followed and whether its prediction held. Pure.

A change counts as followed where the engine's labels show it or, for flags without a label, where
the signals can only come from it. A restart alone proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, APPLIED, KEPT, MISSED = "open", "applied", "kept", "missed"
WORSENED, LAPSED = "worsened", "lapsed"

LAPSED_S = 24 * 3600.0
"""A change within this time after its recommendation counts as following it."""

SETTLED_S = 120.0
"""Settling time in seconds after a restart: caches are cold and the window is filling."""

NEAR_RATIO = 0.15
"""Largest relative error of a prediction that counts as right."""

GROWN_RATIO = 1.02

Means = Mapping[str, float | None]
Change = Mapping[str, Any]
"""A change as in the JSON document: flag, from, to."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The signal of a predicted number; a prediction within `near` of it always counts as right."""

    signal: str
    near: float
    more_is_better: bool = False


MEASURES: Mapping[str, Measure] = {
    "kv_capacity_tokens": Measure("kv_capacity_tokens", 64, more_is_better=True),
    "kv_usage_ratio": Measure("kv_usage_avg_ratio", 0.03),
    "preemption_per_s": Measure("preemption_per_s", 0.05),
    "waiting": Measure("waiting_avg", 1),
    "waiting_deferred": Measure("waiting_deferred_avg", 1),
    "queue_wait_s": Measure("queue_mean_s", 0.05),
    "ttft_s": Measure("ttft_mean_s", 0.02),
    "itl_s": Measure("itl_mean_s", 0.002),
    "prefill_mean_s": Measure("prefill_mean_s", 0.01),
    "itl_stall_per_s": Measure("itl_stall_per_s", 0.05),
    "itl_stall_time_ratio": Measure("itl_stall_time_ratio", 0.01),
    "spec_acceptance_ratio": Measure("spec_acceptance_ratio", 0.05, more_is_better=True),
    "lora_max": Measure("lora_max", 0, more_is_better=True),
}

FELT: Mapping[str, frozenset[str]] = {
    "preemption_per_s": frozenset(),
    "ttft_s": frozenset({"waiting", "queue_wait_s", "prefill_mean_s"}),
    "itl_s": frozenset({"itl_stall_per_s", "itl_stall_time_ratio"}),
}
"""Numbers that users notice. Each counts as worsened even if nothing was predicted, unless it or
one of the numbers beside it was predicted."""

EVIDENT = frozenset({"--max-loras", "--speculative-config", "--max-num-seqs"})
"""Flags without a label whose effect the signals show."""

EVIDENCE = ("running_max", "lora_max", "spec_draft_tokens_per_s", "running_avg", "waiting_avg")
SIGNALS = tuple(dict.fromkeys([*(m.signal for m in MEASURES.values()), *EVIDENCE]))
"""The signals needed from before and after a change."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict as one word, and the measured values of the predicted numbers."""

    word: str
    measured: Mapping[str, float]


def signals_show_change(change: Change, before: Means, after: Means) -> bool:
    """Whether the signals show a change that has no label."""
    flag, old, new = change["flag"], change["from"], change["to"]
    if flag == "--max-loras":
        return bool(after.get("lora_max") == new)
    if flag == "--speculative-config" and new is None:
        drafted = "spec_draft_tokens_per_s"
        return bool(before.get(drafted)) and not after.get(drafted)
    if flag == "--max-num-seqs" and isinstance(new, int | float):
        running, most = before.get("running_max"), after.get("running_max")
        if running is None or most is None:
            return False
        if new < (running if old is None else old):
            queued = (after.get("waiting_avg") or 0.0) >= 1
            return most <= new and queued and running > new
        return new >= most > GROWN_RATIO * max(running, float(old or 0.0))
    return False


def outcome_of(document: Mapping[str, Any], before: Means, after: Means) -> Outcome | None:
    """The outcome of a followed recommendation; None where no predicted number can be measured.

    kept: every number is as predicted or better. worsened: a predicted number, or one that users
    notice, is worse than before although that was not predicted. missed: everything else.
    """
    measured: dict[str, float] = {}
    right, worse = True, False
    predicted = document["predicted"]
    for key, measure in MEASURES.items():
        expected, now = predicted.get(key), after.get(measure.signal)
        if expected is None or now is None:
            continue
        measured[key] = now
        if _worse(measure, now, expected):
            right = False
            worse = worse or _grew_worse(measure, before, now)
    if not measured:
        return None
    for key, parts in FELT.items():
        measure, now = MEASURES[key], after.get(MEASURES[key].signal)
        predicted_keys = predicted.keys() & {key, *parts}
        if not predicted_keys and now is not None and _grew_worse(measure, before, now):
            measured[key], worse = now, True
    return Outcome(WORSENED if worse else KEPT if right else MISSED, measured)


def _grew_worse(measure: Measure, before: Means, now: float) -> bool:
    old = before.get(measure.signal)
    return old is not None and _worse(measure, now, old)


def _worse(measure: Measure, now: float, than: float) -> bool:
    apart = than - now if measure.more_is_better else now - than
    return apart > max(measure.near, NEAR_RATIO * abs(than))
