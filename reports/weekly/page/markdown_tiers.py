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
    as_sentence,
    change,
    flag,
    moved,
    points,
    saved,
    share,
    spread,
    state,
    with_unit,
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
    flags = ", ".join(f"**{text(flag(change))}**" for change in changes)
    return f"{flags}." if flags else ""


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
        to_have = f" To enable it: {text(as_sentence(row.enable))}" if row.enable else ""
        note = f"{text(as_sentence(row.missing))}{to_have}"
    elif not note:
        note = text(as_sentence(row.enable))
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
        f"{text(trend.name)} {with_unit(trend.value, trend.unit)}".strip() for trend in figures
    )


def _before(trend: Trend) -> str:
    """The former value, with the change since where there is one."""
    if trend.before is None:
        return "-"
    since = f" ({arrow(trend)} {change(trend)})" if arrow(trend) else ""
    return f"{with_unit(trend.before, trend.unit)}{since}"


def slo(tier: TierSlo, _calendar: Calendar) -> Lines:
    """Latencies against their targets, the error budget, where the time goes."""
    budget = tier.budget
    shares = {"queue": tier.queue_ratio, "prefill": tier.prefill_ratio,
              "decode": tier.decode_ratio, "other": tier.other_ratio}  # fmt: skip
    heads = ("Latency", "P50", "P95", "P99", "Mean", "Target of P99", "In time", "State")
    return sections(
        bullets([_missing(tier.missing)]),
        rows(heads, (_latency(latency) for latency in tier.latencies)),
        bullets([
            f"throughput: {_now(tier.served_per_s)}",
            f"goodput: {_now(tier.goodput_per_s)}",
            f"error budget: {with_unit(budget.spent_ratio, 'ratio')} spent; "
            f"{share(budget.objective_ratio)} of "
            f"{with_unit(budget.requests, 'requests')} must be in "
            f"time, {with_unit(budget.bad_requests, 'requests')} were late",
            _missing(budget.missing),
            "request time: "
            + ", ".join(f"{name} {with_unit(value, 'ratio')}" for name, value in shares.items()),
        ]),
    )  # fmt: skip


def _latency(latency: Latency) -> tuple[str, ...]:
    none = latency.budget_s is None
    return (
        text(LATENCIES.get(latency.name, latency.name)),
        *(
            with_unit(trend.value, trend.unit)
            for trend in (latency.p50, latency.p95, latency.p99, latency.mean)
        ),
        "none" if none else with_unit(latency.budget_s, "s"),
        "-" if none else share(latency.within_ratio),
        f"{'no target' if none else STATES[state(latency.state)]} {_missing(latency.missing)}",
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
            f"peak (P99): {with_unit(tier.peak_in_flight, '')} in flight{highest}",
            f"peak at {with_unit(tier.position_ratio, 'ratio')} of C_max",
            f"Little's law: {with_unit(tier.little_requests_per_s, 'per_s')}"
            + ("" if gap is None else f", {number(gap)}x the usable load"),
            f"learned from {plural(tier.windows, 'window')}. {text(tier.basis)}",
        ]),
        rows(("Figure", "Benchmark", "Production", "Difference", "Allowed", "State"), (
            (text(row.name),
             with_unit(row.benchmark, row.unit), with_unit(row.production, row.unit),
             points(row.off, row.unit), points(row.limit, row.unit),
             f"{STATES[state(row.state)]} {_missing(row.missing)}")
            for row in tier.benchmark
        )),
    )  # fmt: skip


def workload(tier: TierWorkload, _calendar: Calendar) -> Lines:
    """Lengths, arrivals, archetype, drift."""
    kind = "Archetype unknown: no request lengths."
    if tier.archetype:
        kind = f"**{text(tier.archetype.capitalize())}.** {text(as_sentence(tier.archetype_why))}"
    arrivals = tier.arrivals
    return sections(
        [kind + (f" Bottleneck: {text(as_sentence(tier.bottleneck))}" if tier.bottleneck else "")],
        rows(
            ("Tokens per request", "P50", "P95", "P99", "Mean"),
            (
                (
                    name,
                    *(
                        moved(trend)
                        for trend in (lengths.p50, lengths.p95, lengths.p99, lengths.mean)
                    ),
                )
                for name, lengths in (("prompt", tier.prompt), ("output", tier.output))
            ),
        ),
        bullets(
            [
                *(
                    f"arrivals over {span(arrivals.window_s)}, {text(trend.name)}: {_now(trend)}"
                    for trend in (arrivals.mean_per_s, arrivals.p95_per_s, arrivals.p99_per_s)
                ),
                *(
                    _missing(missing)
                    for missing in (
                        arrivals.missing,
                        tier.prompt.missing,
                        tier.output.missing,
                        tier.drift_missing,
                    )
                ),
            ]
        ),
        rows(
            ("Drift", "Stated", "Measured", "Measured / stated", "State"),
            (
                (
                    text(drift.name),
                    with_unit(drift.stated, drift.unit),
                    with_unit(drift.measured, drift.unit),
                    with_unit(drift.ratio, "factor"),
                    STATES[state(drift.state)],
                )
                for drift in tier.drift
            ),
        ),
    )


def size(tier: TierSize, _calendar: Calendar) -> Lines:
    """GPUs present and needed, alternatives at today's prices, changes that save."""
    headroom = "headroom unknown"
    if tier.headroom_ratio is not None:
        over = "over" if tier.headroom_ratio >= 0 else "short of"
        headroom = f"{percent(abs(tier.headroom_ratio))} {over} the peak"
    return sections(
        [f"**{SIZES.get(tier.verdict, SIZES['unknown'])}.** {_missing(tier.missing)}".strip()],
        bullets(
            [
                *(_missing(doubt) for doubt in tier.doubts),
                f"replicas: {tier.replicas_present} present, "
                f"{with_unit(tier.replicas_needed, '')} needed",
                f"GPUs: {with_unit(tier.gpus_present, '')} present, "
                f"{with_unit(tier.gpus_needed, '')} needed",
                f"{headroom}; KV cache at peak {with_unit(tier.kv_peak_ratio, 'ratio')}",
            ]
        ),
        bullets(f"{text(part.name)}: {with_unit(part.bytes, 'bytes')}" for part in tier.memory),
        rows(
            ("Cheapest GPUs for this workload today", "GPUs", "Capacity", "Cost"),
            (
                (
                    f"{option.replicas} {TIMES} {text(option.gpu)}, "
                    f"tensor parallel {option.tensor_parallel}; {text(option.text)}",
                    with_unit(option.gpus, "gpus"),
                    with_unit(option.usable_requests_per_s, "per_s"),
                    with_unit(option.usd_per_hour, "usd_per_hour"),
                )
                for option in tier.options
            ),
        ),
        rows(("Change", "Effect", "GPUs after", "Money"), (_lever(lever) for lever in tier.levers)),
        bullets(text(note) for note in tier.notes),
    )


def _lever(lever: Lever) -> tuple[str, ...]:
    does = (
        f"{code(of.signal)} {quantity(of.signal, of.before)} → {quantity(of.signal, of.after)}"
        for of in lever.figures
    )
    return (
        f"{text(lever.summary)} {flags(lever.changes)}",
        "; ".join(does),
        with_unit(lever.gpus_after, "gpus"),
        saved(lever.saves_usd_per_hour, "usd_per_hour"),
    )


def money(tier: TierMoney, _calendar: Calendar) -> Lines:
    """What was paid, for what, and what the recommendations save."""
    trends = (tier.usd, tier.tokens_per_gpu_hour, tier.usd_per_million_tokens,
              tier.requests_per_s_per_gpu, tier.requests_in_time_per_usd,
              tier.tokens_per_s_per_hbm_gb, tier.utilization_ratio)  # fmt: skip
    return sections(
        bullets(
            [
                _missing(tier.missing),
                *(f"{text(trend.name)}: {_now(trend)}" for trend in trends),
                "at full utilization: "
                + with_unit(tier.usd_per_million_tokens_at_full, "usd_per_million_tokens"),
                f"idle: {with_unit(tier.idle_hours, 'gpu_hours')} "
                f"({with_unit(tier.idle_ratio, 'ratio')}), "
                f"{with_unit(tier.idle_usd, 'usd')}",
                f"price per GPU: {with_unit(tier.usd_per_gpu_hour, 'usd_per_hour')}"
                + (f"; {text(tier.price_source)}" if tier.price_source else ""),
            ]
        ),
        rows(
            ("Recommendation", "Where", "Money", "Per month", "Risk", "Outcome"),
            (
                (
                    text(saving.summary),
                    f"{text(saving.target)}, engine {text(saving.engine)}",
                    saved(saving.saves_usd_per_hour, "usd_per_hour"),
                    saved(saving.saves_usd_per_month, "usd"),
                    text(saving.risk),
                    text(FATES.get(saving.fate, ("unknown", saving.fate))[1]),
                )
                for saving in tier.savings
            ),
        ),
    )


def _now(trend: Trend) -> str:
    """A figure with its change, or what is missing."""
    return f"{moved(trend)}. {_missing(trend.missing)}" if trend.value is None else moved(trend)


def _missing(words: str) -> str:
    return text(as_sentence(words))
