"""The tier sections of the report as Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.formatting import number, percent, plural, quantity, span
from kneewatch.reports.weekly.figures import FlagChange, Trend
from kneewatch.reports.weekly.page.formatting import (
    FATES,
    LATENCIES,
    PLAIN,
    SIZES,
    STATES,
    TIMES,
    UNKNOWN,
    Calendar,
    arrow,
    change,
    flag,
    moved,
    points,
    said,
    saved,
    share,
    spread,
    state,
    told,
)
from kneewatch.reports.weekly.tier_sections import (
    Latency,
    Lever,
    TableRow,
    TierKnee,
    TierMoney,
    TierSize,
    TierSlo,
    TierTables,
    TierWorkload,
)

NAME = re.compile(r"[\w.:/+-]+")


def text(value: str) -> str:
    """Text on one line with all Markdown escaped."""
    return escaped(" ".join(value.split()))


def code(value: str) -> str:
    """A name as code; other text as text, since a backtick in it would end the code."""
    return f"`{value}`" if NAME.fullmatch(value) else text(value)


def sections(*parts: Sequence[str]) -> list[str]:
    """The non-empty parts, separated by blank lines."""
    lines: list[str] = []
    for part in parts:
        if part:
            lines += [*([""] if lines else []), *part]
    return lines


def rows(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table, empty without rows. The cells are Markdown with their bars escaped."""
    lines = [f"| {' | '.join(cell.strip() or '-' for cell in cells)} |" for cells in body]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines] if lines else []


def bullets(lines: Iterable[str]) -> list[str]:
    """A list of the non-empty lines."""
    return [f"- {line.strip()}" for line in lines if line.strip()]


def flags(changes: Iterable[FlagChange]) -> str:
    """Changes of flags; empty for none. No code: a backtick in one would end it."""
    told = ", ".join(f"**{text(flag(made))}**" for made in changes)
    return f"{told}." if told else ""


# --- Sections of a tier ---------------------------------------------------------------------------


Lines = list[str]


def tables(tier: TierTables, calendar: Calendar) -> Lines:
    """All rows of the metric tables."""
    heads = ("Metric", calendar.now.capitalize(), "Target", "State", calendar.before.capitalize(),
             "Note")  # fmt: skip
    return sections(
        ["Monitoring"],
        rows(heads, (_row(row) for row in tier.monitoring)),
        ["KV cache"],
        rows(heads, (_row(row) for row in tier.kv)),
    )


def _row(row: TableRow) -> tuple[str, ...]:
    word = state(row.state)
    note = text(row.advice)
    if word in ("unknown", "off"):
        to_have = f" To enable it: {text(said(row.enable))}" if row.enable else ""
        note = f"{text(said(row.missing))}{to_have}"
    elif not note:
        note = text(said(row.enable))
    return (
        text(row.subject),
        _figures(row.figures) or ("-" if word == "off" else UNKNOWN),
        text(row.band),
        STATES[word] if word in ("ok", *PLAIN) else f"**{STATES[word]}**",
        "; ".join(_before(trend) for trend in row.figures),
        note,
    )


def _figures(figures: Sequence[Trend]) -> str:
    """The values of a row; empty where none is known."""
    if all(trend.value is None for trend in figures):
        return ""
    return "; ".join(
        f"{text(trend.name)} {told(trend.value, trend.unit)}".strip() for trend in figures
    )


def _before(trend: Trend) -> str:
    """The former value, with the change since where there is one."""
    if trend.before is None:
        return "-"
    since = f" ({arrow(trend)} {change(trend)})" if arrow(trend) else ""
    return f"{told(trend.before, trend.unit)}{since}"


def slo(tier: TierSlo, _calendar: Calendar) -> Lines:
    """Latencies against their targets, the error budget, where the time goes."""
    budget = tier.budget
    shares = {"queue": tier.queue_ratio, "prefill": tier.prefill_ratio,
              "decode": tier.decode_ratio, "other": tier.other_ratio}  # fmt: skip
    heads = ("Latency", "P50", "P95", "P99", "Mean", "Target of P99", "In time", "State")
    return sections(
        bullets([_missing(tier.missing)]),
        rows(heads, (_latency(one) for one in tier.latencies)),
        bullets([
            f"throughput: {_now(tier.served_per_s)}",
            f"goodput: {_now(tier.goodput_per_s)}",
            f"error budget: {told(budget.spent_ratio, 'ratio')} spent; "
            f"{share(budget.objective_ratio)} of {told(budget.requests, 'requests')} must be in "
            f"time, {told(budget.bad_requests, 'requests')} were late",
            _missing(budget.missing),
            "request time: "
            + ", ".join(f"{name} {told(value, 'ratio')}" for name, value in shares.items()),
        ]),
    )  # fmt: skip


def _latency(one: Latency) -> tuple[str, ...]:
    none = one.budget_s is None
    return (
        text(LATENCIES.get(one.name, one.name)),
        *(told(trend.value, trend.unit) for trend in (one.p50, one.p95, one.p99, one.mean)),
        "none" if none else told(one.budget_s, "s"),
        "-" if none else share(one.within_ratio),
        f"{'no target' if none else STATES[state(one.state)]} {_missing(one.missing)}",
    )


def knee(tier: TierKnee, calendar: Calendar) -> Lines:
    """Where the knee is, and where the peak sat."""
    least = "" if tier.reached else "at least "
    usable, c_max = tier.usable_requests_per_s, tier.c_max
    highest = "" if tier.peak_at_s is None else (
        f"; highest on {calendar.moment(tier.peak_at_s)} at {text(tier.peak_target)}")  # fmt: skip
    gap = tier.little_gap_ratio
    return sections(
        bullets([
            _missing(tier.missing),
            f"C_max of one engine: {least}{spread(c_max, '')} in flight" if c_max
            else f"C_max of one engine: {UNKNOWN}",
            f"usable load of one engine: {least if usable else ''}{spread(usable, 'per_s')}",
            f"peak (P99): {told(tier.peak_in_flight, '')} in flight{highest}",
            f"peak at {told(tier.position_ratio, 'ratio')} of C_max",
            f"Little's law: {told(tier.little_requests_per_s, 'per_s')}"
            + ("" if gap is None else f", {number(gap)}x the usable load"),
            f"learned from {plural(tier.windows, 'window')}. {text(tier.basis)}",
        ]),
        rows(("Figure", "Benchmark", "Production", "Difference", "Allowed", "State"), (
            (text(one.name), told(one.benchmark, one.unit), told(one.production, one.unit),
             points(one.off, one.unit), points(one.limit, one.unit),
             f"{STATES[state(one.state)]} {_missing(one.missing)}")
            for one in tier.benchmark
        )),
    )  # fmt: skip


def workload(tier: TierWorkload, _calendar: Calendar) -> Lines:
    """Lengths, arrivals, archetype, drift."""
    kind = "Archetype unknown: no request lengths."
    if tier.archetype:
        kind = f"**{text(tier.archetype.capitalize())}.** {text(said(tier.archetype_why))}"
    arrivals = tier.arrivals
    return sections(
        [kind + (f" Bottleneck: {text(said(tier.bottleneck))}" if tier.bottleneck else "")],
        rows(("Tokens per request", "P50", "P95", "P99", "Mean"), (
            (name, *(moved(trend) for trend in (one.p50, one.p95, one.p99, one.mean)))
            for name, one in (("prompt", tier.prompt), ("output", tier.output))
        )),
        bullets([
            *(f"arrivals over {span(arrivals.window_s)}, {text(trend.name)}: {_now(trend)}"
              for trend in (arrivals.mean_per_s, arrivals.p95_per_s, arrivals.p99_per_s)),
            *(_missing(one) for one in (arrivals.missing, tier.prompt.missing,
                                        tier.output.missing, tier.drift_missing)),
        ]),
        rows(("Drift", "Stated", "Measured", "Measured / stated", "State"), (
            (text(one.name), told(one.stated, one.unit), told(one.measured, one.unit),
             told(one.ratio, "factor"), STATES[state(one.state)])
            for one in tier.drift
        )),
    )  # fmt: skip


def size(tier: TierSize, _calendar: Calendar) -> Lines:
    """GPUs present and needed, alternatives at today's prices, changes that save."""
    room = "headroom unknown"
    if tier.headroom_ratio is not None:
        over = "over" if tier.headroom_ratio >= 0 else "short of"
        room = f"{percent(abs(tier.headroom_ratio))} {over} the peak"
    return sections(
        [f"**{SIZES.get(tier.verdict, SIZES['unknown'])}.** {_missing(tier.missing)}".strip()],
        bullets([
            *(_missing(doubt) for doubt in tier.doubts),
            f"replicas: {tier.replicas_present} present, {told(tier.replicas_needed, '')} needed",
            f"GPUs: {told(tier.gpus_present, '')} present, {told(tier.gpus_needed, '')} needed",
            f"{room}; KV cache at peak {told(tier.kv_peak_ratio, 'ratio')}",
        ]),
        bullets(f"{text(part.name)}: {told(part.bytes, 'bytes')}" for part in tier.memory),
        rows(("Cheapest GPUs for this workload today", "GPUs", "Capacity", "Cost"), (
            (f"{one.replicas} {TIMES} {text(one.gpu)}, tensor parallel {one.tensor_parallel}; "
             f"{text(one.text)}", told(one.gpus, "gpus"), told(one.usable_requests_per_s, "per_s"),
             told(one.usd_per_hour, "usd_per_hour"))
            for one in tier.options
        )),
        rows(("Change", "Effect", "GPUs after", "Money"), (
            _lever(one) for one in tier.levers
        )),
        bullets(text(note) for note in tier.notes),
    )  # fmt: skip


def _lever(one: Lever) -> tuple[str, ...]:
    does = (
        f"{code(of.signal)} {quantity(of.signal, of.before)} → {quantity(of.signal, of.after)}"
        for of in one.figures
    )
    return (
        f"{text(one.summary)} {flags(one.changes)}",
        "; ".join(does),
        told(one.gpus_after, "gpus"),
        saved(one.saves_usd_per_hour, "usd_per_hour"),
    )


def money(tier: TierMoney, _calendar: Calendar) -> Lines:
    """What was paid, for what, and what the recommendations save."""
    trends = (tier.usd, tier.tokens_per_gpu_hour, tier.usd_per_million_tokens,
              tier.utilization_ratio)  # fmt: skip
    return sections(
        bullets([
            _missing(tier.missing),
            *(f"{text(trend.name)}: {_now(trend)}" for trend in trends),
            "at full utilization: "
            + told(tier.usd_per_million_tokens_at_full, "usd_per_million_tokens"),
            f"idle: {told(tier.idle_hours, 'gpu_hours')} ({told(tier.idle_ratio, 'ratio')}), "
            f"{told(tier.idle_usd, 'usd')}",
            f"price per GPU: {told(tier.usd_per_gpu_hour, 'usd_per_hour')}"
            + (f"; {text(tier.price_source)}" if tier.price_source else ""),
        ]),
        rows(("Recommendation", "Where", "Money", "Per month", "Risk", "Outcome"), (
            (text(one.summary), f"{text(one.target)}, engine {text(one.engine)}",
             saved(one.saves_usd_per_hour, "usd_per_hour"), saved(one.saves_usd_per_month, "usd"),
             text(one.risk), text(FATES.get(one.fate, ("unknown", one.fate))[1]))
            for one in tier.savings
        )),
    )  # fmt: skip


def _now(trend: Trend) -> str:
    """A figure with its change, or what is missing."""
    return f"{moved(trend)}. {_missing(trend.missing)}" if trend.value is None else moved(trend)


def _missing(words: str) -> str:
    return text(said(words))
