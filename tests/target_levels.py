"""Latency targets from loose to out of reach, and what a verdict may say where one is missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from msgspec.structs import asdict

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets

SIGNALS = ("ttft_p99_s", "itl_p99_s")
"""The signals that targets are for, which are the names of the targets as well."""

LOOSE_RATIO = 3.0
LOOSE_LEAST_S = {"ttft_p99_s": 0.5, "itl_p99_s": 0.1}
"""A target within a few milliseconds of a quick server would be missed by noise."""

UNREACHABLE: dict[str, Targets] = {
    "unreachable": Targets(ttft_p99_s=0.001, itl_p99_s=0.001),
    "unreachable TTFT": Targets(ttft_p99_s=0.001),
    "unreachable ITL": Targets(itl_p99_s=0.001),
}
"""Each target also alone: a cause about both would hide what is said about one."""

LATENCY_CAUSES = frozenset(
    {"slo_conflict", "prefill_bound", "decode_bound", "past_knee", "prefill_interference"}
)
"""Causes that name a missed target and where the time goes. Wherever a target is missed they may
be listed; beside a root cause with evidence of its own they must not come first."""


def loose(healthy: Sequence[Verdict]) -> Targets:
    """Targets that healthy scrapes never miss: three times their highest P99; None without any."""
    highest = {signal: max(_measured(healthy, signal), default=None) for signal in SIGNALS}
    return Targets(
        **{
            signal: None if value is None else max(LOOSE_RATIO * value, LOOSE_LEAST_S[signal])
            for signal, value in highest.items()
        }
    )


def middle(said: Sequence[Verdict]) -> Targets:
    """Targets that about half of the scrapes miss: the medians of their P99s."""
    return Targets(**{signal: _median(_measured(said, signal)) for signal in SIGNALS})


def completed(targets: Targets, others: Sequence[Targets]) -> Targets:
    """Targets where those that are None are the median of others'."""
    return Targets(
        **{
            signal: value
            if value is not None
            else _median([own for other in others if (own := asdict(other)[signal]) is not None])
            for signal, value in asdict(targets).items()
        }
    )


def is_missed(diagnosis: Verdict, targets: Targets) -> bool:
    """Whether the window of a scrape misses a target."""
    return any(
        target_s is not None and (diagnosis.values.get(signal) or 0.0) > target_s
        for signal, target_s in asdict(targets).items()
    )


def _measured(said: Iterable[Verdict], signal: str) -> list[float]:
    return [value for scrape in said if (value := scrape.values.get(signal)) is not None]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
