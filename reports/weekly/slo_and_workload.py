"""The service level of a tier (latency, goodput, error budget), and its workload (request lengths,
arrivals, drift). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean

from kneewatch.collector.signals.table import (
    DECODE,
    E2E,
    ITL,
    OUTPUT_LENGTH,
    PREFILL,
    PROMPT_LENGTH,
    QUEUE,
    TTFT,
)
from kneewatch.diagnose.sizing.plan.plan_result import (
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.diagnose.sizing.plan.workload_profile import ARCHETYPES, WorkloadProfile
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import DOWN, UP, Trend
from kneewatch.reports.weekly.measures import Measure, TierPeriod, in_turn, judged, trend
from kneewatch.reports.weekly.observed import (
    EnginesObserved,
    Slot,
    Span,
    Tally,
    TierObserved,
    TierStated,
)
from kneewatch.reports.weekly.report import (
    Arrivals,
    Drift,
    ErrorBudget,
    Hour,
    Latency,
    Lengths,
    TierSlo,
    TierWorkload,
    WeekdayHour,
)
from kneewatch.rules.formatting import duration, stated_duration
from kneewatch.rules.rule import DAY_S, MINUTE_S

LATENCIES = (
    ("ttft", TTFT),
    ("itl", ITL),
    ("e2e", E2E),
    ("queue", QUEUE),
    ("prefill", PREFILL),
    ("decode", DECODE),
)


OBJECTIVE_RATIO = 0.99
"""The share of requests whose first token must be within the target."""


def no_target(stated: TierStated) -> str:
    """That no TTFT target is set, with what quiet hours suggest."""
    proposed = stated.proposed
    words = "no TTFT target set (slo.ttft_p99_s): late requests are unknown"
    if proposed.ttft_p99_s is None or proposed.itl_p99_s is None:
        return words
    return (
        f"{words}; quiet hours suggest TTFT P99 {duration(proposed.ttft_p99_s)}, ITL P99 "
        f"{duration(proposed.itl_p99_s)}: set slo.ttft_p99_s = {proposed.ttft_p99_s:g} and "
        f"slo.itl_p99_s = {proposed.itl_p99_s:g}"
    )


def slo(tier: str, stated: TierStated, now: TierPeriod, before: TierPeriod) -> TierSlo:
    """The service level of a tier over the period."""
    target_s = stated.profile.targets.ttft_p99_s
    missing = no_target(stated) if target_s is None else "no requests in this period"
    in_time = m.goodput(target_s, stated.profile.targets.itl_p99_s)
    goodput = Measure("goodput_per_s", "goodput", "per_s", in_time, UP, missing=missing)
    shares = [m.share_of_time(part)(now.whole) for part in (QUEUE, PREFILL, DECODE)]
    present = [share for share in shares if share is not None]
    return TierSlo(
        tier=tier,
        latencies=tuple(_latency(name, metric, stated, now, before) for name, metric in LATENCIES),
        served_per_s=trend(m.SERVED, now, before),
        goodput_per_s=trend(goodput, now, before),
        budget=_budget(stated, now.whole),
        hours=tuple(
            _hour(stated, slot, span) for slot, span in zip(now.grid.slots, now.hours, strict=False)
        ),
        by_weekday=_by_weekday(stated, now) if now.hours else (),
        queue_ratio=shares[0],
        prefill_ratio=shares[1],
        decode_ratio=shares[2],
        other_ratio=max(0.0, 1 - sum(present)) if len(present) == len(shares) else None,
        missing="" if now.hours else "the tier was not watched in this period",
    )


def _latency(
    name: str, metric: str, stated: TierStated, now: TierPeriod, before: TierPeriod
) -> Latency:
    budget_s = {
        "ttft": stated.profile.targets.ttft_p99_s,
        "itl": stated.profile.targets.itl_p99_s,
    }.get(name)
    figures = m.percentiles(name, metric, "s", now, before, ending="_s", good=DOWN)
    p50, p99 = figures["p50"], figures["p99"]
    tally = now.whole.tallies.get(metric)
    kept = None if tally is None or budget_s is None else tally.within(budget_s)
    state = "unknown"
    if budget_s is not None and p99.value is not None and p50.value is not None:
        state = "ok" if p99.value <= budget_s else "warning"
        state = "critical" if p50.value > budget_s else state
    return Latency(
        name=name,
        **figures,
        observations=0.0 if tally is None else tally.count,
        budget_s=budget_s,
        within_ratio=m.within(metric, budget_s)(now.whole),
        judged_at_s=None if kept is None else kept[1],
        state=state,
        missing=_coarse(tally),
    )


def _coarse(tally: Tally | None) -> str:
    """A note if the percentile lies in the lowest bucket: its value may then be anywhere below the
    bucket's bound."""
    if tally is None or not tally.count:
        return "no samples"
    lowest_s, below = tally.bounds[0], tally.counts[0] / tally.count
    inside = [f"P{percent}" for percent in m.PERCENTS if below >= percent / 100]
    if not inside or not 0 < lowest_s < math.inf:
        return ""
    return f"{', '.join(inside)}: anywhere below {stated_duration(lowest_s)}, the lowest bucket"


def _budget(stated: TierStated, whole: Span) -> ErrorBudget:
    """The error budget: the share of requests with a late first token, compared with the share that
    the objective allows."""
    requests, (bad, spent) = _requests(whole) or 0.0, _burn(stated, whole)
    is_unset = stated.profile.targets.ttft_p99_s is None
    return ErrorBudget(
        objective_ratio=OBJECTIVE_RATIO,
        requests=requests,
        bad_requests=None if bad is None else bad * requests,
        bad_ratio=bad,
        spent_ratio=spent,
        missing=no_target(stated) if is_unset else "" if requests else "no requests in this period",
    )


def _hour(stated: TierStated, slot: Slot, span: Span) -> Hour:
    bad, burn = _burn(stated, span)
    running = m.level(m.RUNNING)(span)
    waiting = m.level(m.WAITING)(span)
    return Hour(
        start_s=slot.start_s,
        weekday=slot.weekday,
        hour=slot.hour,
        watched_ratio=min(1.0, span.clock_s / (slot.end_s - slot.start_s)),
        requests=_requests(span),
        tokens=span.counts.get(m.GENERATED),
        ttft_p50_s=m.quantile(TTFT, 0.5)(span),
        ttft_p99_s=m.quantile(TTFT, 0.99)(span),
        itl_p99_s=m.quantile(ITL, 0.99)(span),
        in_flight=None if running is None else running + (waiting or 0.0),
        bad_ratio=bad,
        burn=burn,
    )


def _burn(stated: TierStated, span: Span) -> tuple[float | None, float | None]:
    """The share of late requests, and this share divided by the allowed share (burn rate)."""
    kept = m.within(TTFT, stated.profile.targets.ttft_p99_s)(span)
    if kept is None:
        return None, None
    return 1 - kept, (1 - kept) / (1 - OBJECTIVE_RATIO)


def _requests(span: Span) -> float | None:
    tally = span.tallies.get(TTFT)
    return None if tally is None else tally.count


def _by_weekday(stated: TierStated, now: TierPeriod) -> tuple[WeekdayHour, ...]:
    """All 168 hours of a week, including hours without data."""
    cells: dict[tuple[int, int], list[Span]] = {}
    for slot, span in zip(now.grid.slots, now.hours, strict=True):
        cells.setdefault((slot.weekday, slot.hour), []).append(span)
    week: list[WeekdayHour] = []
    for weekday, hour in product(range(7), range(24)):
        span = in_turn(cells.get((weekday, hour), []))
        late_s = m.quantile(TTFT, 0.99)(span)
        week.append(WeekdayHour(weekday, hour, _requests(span), *_burn(stated, span), late_s))
    return tuple(week)


# --- A tier's workload: request lengths, arrivals, archetype, drift (guide 1.1 to 1.3) ------------


LONG_INPUT_TOKENS, LONG_OUTPUT_TOKENS = 2000.0, 800.0
"""Minimum mean lengths of long prompts and long outputs. The guide's archetypes differ in these two
lengths (1.2): RAG has 4,000 and 200 tokens, code generation 200 and 3,000 (8.2)."""

DRIFT_LIMIT = 1.3
"""Maximum ratio of a measured to a planned value. Beyond it, the workload has changed (9.1 step
13)."""

NO_PROFILE = (
    "no sizing workload set (workload_profile or report.profile, a file as for kneewatch size "
    "--plan)"
)
NO_REQUEST = "no request finished in this period"


def workload(tier: TierObserved, now: TierPeriod, before: TierPeriod) -> TierWorkload:
    """The workload of a tier over the period."""
    prompt = _lengths("prompt_tokens", PROMPT_LENGTH, now, before)
    output = _lengths("output_tokens", OUTPUT_LENGTH, now, before)
    kind, why = _archetype(prompt.mean.value, output.mean.value)
    arrived = arrivals(tier, now.grid.from_s)
    saved = m.saved(now.whole)
    return TierWorkload(
        tier=tier.id,
        prompt=prompt,
        output=output,
        computed_prompt_ratio=None if saved is None else 1 - saved,
        arrivals=arrived,
        archetype=kind,
        archetype_why=why,
        bottleneck=ARCHETYPES[kind]["bottleneck"] if kind else "",
        drift=_drift(tier.stated.workload, prompt, output, arrived),
        drift_missing="" if tier.stated.workload is not None else NO_PROFILE,
    )


def _lengths(key: str, metric: str, now: TierPeriod, before: TierPeriod) -> Lengths:
    figures = m.percentiles(key, metric, "tokens", now, before, missing=NO_REQUEST)
    return Lengths(**figures, missing=figures["p50"].missing)


def arrivals(tier: TierObserved, from_s: float) -> Arrivals:
    """Arriving requests/s of the whole tier in each minute, as mean and percentiles."""
    now = requests_per_s(tier.now)
    before = requests_per_s(tier.before)
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


def requests_per_s(of: EnginesObserved) -> list[float | None]:
    """Requests/s of a tier in each minute. None where no engine has a value."""
    all_minutes = (*(engine.minutes for engine in of.engines), of.minutes)
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
    """The q-quantile of some values, with linear interpolation."""
    order = sorted(values)
    place = q * (len(order) - 1)
    low = math.floor(place)
    high = min(low + 1, len(order) - 1)
    return order[low] + (order[high] - order[low]) * (place - low)


def _archetype(inputs: float | None, outputs: float | None) -> tuple[str, str]:
    """The archetype of the guide that fits these mean lengths, and the reason. Both are empty if
    the lengths are unknown."""
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
        f"mean prompt {inputs:,.0f} tokens ({_long(long_in, LONG_INPUT_TOKENS)}), mean output "
        f"{outputs:,.0f} tokens ({_long(long_out, LONG_OUTPUT_TOKENS)})"
    )
    return kind, why


def _long(long: bool, limit_tokens: float) -> str:
    return f"long: {limit_tokens:,.0f} or more" if long else f"short: under {limit_tokens:,.0f}"


def _drift(
    profile: WorkloadProfile | None, prompt: Lengths, output: Lengths, arrived: Arrivals
) -> tuple[Drift, ...]:
    if profile is None:
        return ()
    sized = call_lengths(profile.lengths, profile.session)
    # Of a session only the last call's length is known, not the distribution over all calls.
    input_p95_tokens = None if profile.session else float(sized.input_p95_tokens)
    average, peak = average_requests_per_s(profile), planned_peak_per_s(profile)
    pairs = (
        ("mean prompt", "tokens", sized.mean_input_tokens, prompt.mean.value),
        ("prompt P95", "tokens", input_p95_tokens, prompt.p95.value),
        ("mean output", "tokens", sized.mean_output_tokens, output.mean.value),
        ("output P95", "tokens", float(sized.output_p95_tokens), output.p95.value),
        ("average requests", "per_s", average, arrived.mean_per_s.value),
        ("peak requests", "per_s", peak, arrived.p99_per_s.value),
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
