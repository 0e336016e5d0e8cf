"""A tier's workload: request lengths, arrivals, archetype, drift (guide 1.1 to 1.3). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from kneewatch.collector.signals.vllm import OUTPUT_LENGTH, PROMPT_LENGTH
from kneewatch.diagnose.sizing.plan.workload_profile import archetype
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import Trend
from kneewatch.reports.weekly.hours import DAY_S
from kneewatch.reports.weekly.observed import (
    EngineObserved,
    TierObserved,
    TierTotals,
    WorkloadStated,
)
from kneewatch.reports.weekly.tier_sections import Arrivals, Drift, Lengths, TierWorkload
from kneewatch.reports.weekly.trends import TierPeriod, judged

MINUTE_S = 60.0
LONG_INPUT_TOKENS, LONG_OUTPUT_TOKENS = 2000.0, 800.0
"""Mean lengths from which a prompt or an output counts as long. The guide's archetypes lie on these
two axes (1.2): RAG has 4,000 and 200 tokens, code generation 200 and 3,000 (8.2)."""

DRIFT_LIMIT = 1.3
"""Ratio of measured to stated beyond which the workload has changed (9.1 step 13)."""

NO_PROFILE = (
    "no sizing workload set (workload_profile or report.profile, a file as for kneewatch size "
    "--plan)"
)
NO_REQUEST = "no request finished in this period"


def workload(tier: TierObserved, now: TierPeriod | None, before: TierPeriod | None) -> TierWorkload:
    """The tier's requests over the period."""
    prompt = _lengths("prompt_tokens", PROMPT_LENGTH, now, before)
    output = _lengths("output_tokens", OUTPUT_LENGTH, now, before)
    kind, why = _archetype(prompt.mean.value, output.mean.value)
    arrived = arrivals(tier, now.grid.from_s if now is not None else 0.0)
    saved = m.saved(now.whole) if now is not None else None
    return TierWorkload(
        tier=tier.id,
        prompt=prompt,
        output=output,
        computed_prompt_ratio=None if saved is None else 1 - saved,
        arrivals=arrived,
        archetype=kind,
        archetype_why=why,
        bottleneck=archetype(kind).bottleneck if kind else "",
        drift=_drift(tier.stated.workload, prompt, output, arrived),
        drift_missing="" if tier.stated.workload is not None else NO_PROFILE,
    )


def _lengths(key: str, metric: str, now: TierPeriod | None, before: TierPeriod | None) -> Lengths:
    figures = m.percentiles(key, metric, "tokens", now, before, missing=NO_REQUEST)
    return Lengths(**figures, missing=figures["p50"].missing)


def arrivals(tier: TierObserved, from_s: float) -> Arrivals:
    """Arrival rates of the whole tier per minute, and their percentiles."""
    now = _per_s(tier.engines, tier.totals)
    before = _per_s(tier.before, tier.totals_before)
    rates = [(at, rate) for at, rate in enumerate(now) if rate is not None]
    highest = max(rates, key=lambda hour_and_rate: hour_and_rate[1], default=None)
    mean, p95, p99 = (
        _rate_trend(name, q, now, before)
        for name, q in (("mean", None), ("P95", 0.95), ("P99", 0.99))
    )
    return Arrivals(
        window_s=MINUTE_S,
        mean_per_s=mean,
        p95_per_s=p95,
        p99_per_s=p99,
        highest_per_s=highest[1] if highest else None,
        highest_at_s=from_s + highest[0] * MINUTE_S if highest else None,
        peak_to_mean_ratio=m.over(p99.value, mean.value),
        missing="" if rates else NO_REQUEST,
    )


def _per_s(engines: Sequence[EngineObserved], together: TierTotals) -> list[float | None]:
    """The tier's requests/s in each minute; None if unknown for all engines."""
    all_minutes = (*(engine.minutes for engine in engines), together.minutes)
    columns = [minutes for minutes in all_minutes if minutes]
    rates: list[float | None] = []
    for minute in zip(*columns, strict=False):
        begun_in = [begun for begun in minute if not math.isnan(begun)]
        rates.append(math.fsum(begun_in) / MINUTE_S if begun_in else None)
    return rates


def _rate_trend(
    name: str, q: float | None, now: Sequence[float | None], before: Sequence[float | None]
) -> Trend:
    quantile = Trend(
        f"arrival_{name.lower()}_per_s", name, "per_s", _rate(now, q), _rate(before, q)
    )
    if quantile.value is None:
        return Trend(quantile.key, name, "per_s", None, quantile.before, missing=NO_REQUEST)
    return judged(quantile, "", _daily(now, q), _daily(before, q))


def _daily(rates: Sequence[float | None], q: float | None) -> list[float | None]:
    minutes_per_day = int(DAY_S / MINUTE_S)
    return [
        _rate(rates[at : at + minutes_per_day], q) for at in range(0, len(rates), minutes_per_day)
    ]


def _rate(rates: Sequence[float | None], q: float | None) -> float | None:
    present = [rate for rate in rates if rate is not None]
    if not present:
        return None
    return fmean(present) if q is None else quantile(present, q)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of some values, linear between neighbours."""
    order = sorted(values)
    place = q * (len(order) - 1)
    low = math.floor(place)
    high = min(low + 1, len(order) - 1)
    return order[low] + (order[high] - order[low]) * (place - low)


def _archetype(inputs: float | None, outputs: float | None) -> tuple[str, str]:
    """The guide's archetype by mean lengths, and the reason; empty if unknown."""
    if inputs is None or outputs is None:
        return "", ""
    long_in, long_out = inputs >= LONG_INPUT_TOKENS, outputs >= LONG_OUTPUT_TOKENS
    kind = {
        (False, False): "chat",
        (True, False): "rag",
        (False, True): "code",
        (True, True): "agentic",
    }[long_in, long_out]
    why = (
        f"mean prompt {inputs:.0f} tokens ({'long' if long_in else 'short'}, limit "
        f"{LONG_INPUT_TOKENS:.0f}), mean output {outputs:.0f} ({'long' if long_out else 'short'}, "
        f"limit {LONG_OUTPUT_TOKENS:.0f})"
    )
    return kind, why


def _drift(
    stated: WorkloadStated | None, prompt: Lengths, output: Lengths, arrived: Arrivals
) -> tuple[Drift, ...]:
    if stated is None:
        return ()
    pairs = (
        ("mean prompt", "tokens", stated.input_mean_tokens, prompt.mean.value),
        ("prompt P95", "tokens", stated.input_p95_tokens, prompt.p95.value),
        ("mean output", "tokens", stated.output_mean_tokens, output.mean.value),
        ("output P95", "tokens", stated.output_p95_tokens, output.p95.value),
        ("average requests", "per_s", stated.average_requests_per_s, arrived.mean_per_s.value),
        ("peak requests", "per_s", stated.peak_requests_per_s, arrived.p99_per_s.value),
    )
    return tuple(
        _drifted(name, unit, expected, measured)
        for name, unit, expected, measured in pairs
        if expected is not None
    )


def _drifted(name: str, unit: str, expected: float, measured: float | None) -> Drift:
    ratio = m.over(measured, expected)
    state = "unknown"
    if ratio is not None:
        state = "ok" if 1 / DRIFT_LIMIT <= ratio <= DRIFT_LIMIT else "warning"
    return Drift(name, unit, expected, measured, ratio, DRIFT_LIMIT, state)
