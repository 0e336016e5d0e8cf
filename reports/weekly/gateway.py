"""A tier's limits for the gateway and its replicas by hour, of the measured workload (guide 9.2,
9.4). Pure."""

from __future__ import annotations

from math import ceil, inf

from kneewatch.collector.signals.vllm import PREFILL
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.replica_count import circuit_breaker, input_limit, size_fleet
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.measures import TierPeriod
from kneewatch.reports.weekly.slo_and_workload import MINUTE_S, quantile
from kneewatch.reports.weekly.tier_sections import Lengths
from kneewatch.rules.formatting import plural

SCHEDULED = {"Mon-Fri": range(5), "Sat-Sun": range(5, 7)}
HOURS = range(24)


def limits(
    prompt: Lengths, output: Lengths, now: TierPeriod, *,
    served_per_s: float | None, ttft_target_s: float | None, max_model_len: int | None,
) -> tuple[str, ...]:  # fmt: skip
    """The limits on input, output and queue, or why one is unknown. `served_per_s` is the rate of
    the whole tier at its limit."""
    lines: list[str] = []
    p95, p99, answers = prompt.p95.value, prompt.p99.value, output.p99.value
    if p95 and p99 and answers:
        longest = (max_model_len or inf) - answers
        allowed, _ = input_limit(
            p95_input_tokens=p95, p99_input_tokens=p99, max_model_len=max(longest, 1.0)
        )
        model = "" if max_model_len is None else f" (now {max_model_len:,})"
        lines += [
            f"max_input_tokens {allowed:,}: twice the P95 prompt, at least its P99",
            f"max_tokens {ceil(answers):,}: the P99 output. With both, --max-model-len "
            f"{allowed + ceil(answers):,} is enough{model}",
        ]
    unknown = "the rate that the tier can serve is unknown" if served_per_s is None else ""
    if ttft_target_s is None:
        unknown = "no TTFT target set (slo.ttft_p99_s)"
    if unknown or ttft_target_s is None or not served_per_s:
        return (*lines, f"no queue limit: {unknown}")
    try:
        low, high, _ = circuit_breaker(
            ttft_target_s=ttft_target_s,
            arrivals_per_s=served_per_s,
            served_per_s=served_per_s,
            quiet_ttft_s=m.mean(PREFILL)(now.whole) or 0.0,
        )
    except SizingError as error:
        return (*lines, f"no queue limit: {error}")
    return (*lines, f"HTTP 429 from {low:,} to {high:,} queued requests on, in the whole tier")


def schedule(
    rates_per_s: list[float | None], now: TierPeriod, *, usable_per_s: float | None, safety: float
) -> tuple[str, ...]:
    """Replicas by hour for workdays and weekends, each rise an hour ahead; empty if they are always
    as many or hours are unknown. `rates_per_s`: the tier's requests/s by minute of the period."""
    busiest: dict[tuple[str, int], float] = {}
    for slot in now.grid.slots:
        at = [round((t_s - now.grid.from_s) / MINUTE_S) for t_s in (slot.start_s, slot.end_s)]
        rates = [rate for rate in rates_per_s[at[0] : at[1]] if rate is not None]
        name = next(name for name, days in SCHEDULED.items() if slot.weekday in days)
        if rates:
            place = (name, slot.hour)
            busiest[place] = max(busiest.get(place, 0.0), quantile(rates, 0.95))
    if not usable_per_s or len(busiest) < len(SCHEDULED) * len(HOURS):
        return ()
    needed = {
        place: size_fleet(
            peak_requests_per_s=max(rate, 1e-6), usable_requests_per_s=usable_per_s, safety=safety
        ).gpus_rounded_once
        for place, rate in busiest.items()
    }
    lines: list[str] = []
    for name in SCHEDULED:
        warm = [max(needed[name, hour], needed[name, (hour + 1) % 24]) for hour in HOURS]
        steps = [
            f"from {hour:02}:00 {warm[hour]}" for hour in HOURS[1:] if warm[hour] != warm[hour - 1]
        ]
        lines.append(f"{name}: " + ", ".join([plural(warm[0], "replica"), *steps]))
    return tuple(lines) if len(set(needed.values())) > 1 else ()
