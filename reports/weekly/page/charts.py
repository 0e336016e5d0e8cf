"""Everything that is drawn of a tier. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.reports.weekly.page import plots
from kneewatch.reports.weekly.page.heat import Heat, heat
from kneewatch.reports.weekly.page.moments import Calendar
from kneewatch.reports.weekly.page.plots import Plot
from kneewatch.reports.weekly.page.sparks import Part, Squares, squares, stack
from kneewatch.reports.weekly.page.telling import told
from kneewatch.reports.weekly.planning import TierMoney, TierSize
from kneewatch.reports.weekly.service import TierKnee, TierSlo

TTFT = "ttft"


@dataclass(frozen=True, slots=True)
class Charts:
    """A tier's charts; None or empty where there is nothing to draw."""

    latency: Plot | None = None
    requests: Plot | None = None
    heat: Heat | None = None
    shares: tuple[Part, ...] = ()
    knee_tokens: Plot | None = None
    knee_latency: Plot | None = None
    present: Squares | None = None
    needed: Squares | None = None
    memory: tuple[Part, ...] = ()
    hours: tuple[Part, ...] = ()


def charts(
    slo: TierSlo | None,
    knee: TierKnee | None,
    size: TierSize | None,
    money: TierMoney | None,
    calendar: Calendar,
) -> Charts:
    """The charts of a tier."""
    present, needed = _gpus(size)
    return Charts(
        latency=plots.latency_by_hour(slo.hours, calendar, budget_s(slo)) if slo else None,
        requests=plots.requests_by_hour(slo.hours, calendar) if slo else None,
        heat=heat(slo.by_weekday) if slo else None,
        shares=_shares(slo),
        knee_tokens=plots.knee_tokens(knee) if knee else None,
        knee_latency=plots.knee_latency(knee) if knee else None,
        present=present,
        needed=needed,
        memory=_memory(size),
        hours=_hours(money),
    )


def budget_s(slo: TierSlo) -> float | None:
    """The target of TTFT at P99; None where none is stated."""
    return next((one.budget_s for one in slo.latencies if one.name == TTFT), None)


def _shares(slo: TierSlo | None) -> tuple[Part, ...]:
    """Where a request's time goes."""
    if slo is None:
        return ()
    named = (
        ("in the queue", slo.queue_ratio),
        ("prefill", slo.prefill_ratio),
        ("decode", slo.decode_ratio),
        ("the rest", slo.other_ratio),
    )
    known = [(name, ratio, told(ratio, "ratio")) for name, ratio in named if ratio is not None]
    return stack(known, whole=max(1.0, sum(ratio for _, ratio, _ in known))) if known else ()


def _gpus(size: TierSize | None) -> tuple[Squares | None, Squares | None]:
    if size is None or size.gpus_present is None or size.gpus_needed is None:
        return None, None
    present, needed = size.gpus_present, size.gpus_needed
    return squares(present, beside=needed), squares(needed, beside=present)


def _memory(size: TierSize | None) -> tuple[Part, ...]:
    """One GPU's memory; what no part takes stays free."""
    if size is None or not size.memory:
        return ()
    parts = [(part.name, part.bytes, told(part.bytes, "bytes")) for part in size.memory]
    taken = sum(part.bytes for part in size.memory)
    return stack(parts, whole=max(taken, size.gpu_memory_bytes or 0.0))


def _hours(money: TierMoney | None) -> tuple[Part, ...]:
    """The paid GPU-hours, those with hardly a request apart."""
    if money is None or money.idle_ratio is None or not 0 <= money.idle_ratio <= 1:
        return ()
    busy = 1.0 - money.idle_ratio
    parts = [
        ("with requests", busy, told(busy, "ratio")),
        ("idle", money.idle_ratio, told(money.idle_ratio, "ratio")),
    ]
    return stack(parts, whole=1.0)
