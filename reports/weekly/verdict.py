"""The verdict on a tier: health, size, cost, first action. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.recommend.advice import REPLICAS
from kneewatch.reports.lines import first_sentence, usd
from kneewatch.reports.weekly.figures import Period, Trend
from kneewatch.reports.weekly.incidents import STOPPED
from kneewatch.reports.weekly.report import (
    Action,
    Incident,
    TableRow,
    Tier,
    TierKnee,
    TierMoney,
    TierSize,
    TierSlo,
    TierTables,
    TierWorkload,
    WeeklyVerdict,
)
from kneewatch.rules.formatting import duration, number, percent, plural, span
from kneewatch.rules.rule import BY_WORD, Severity

SIZED = ("right", "too small", "too large")
NOT_WATCHED = "no engine was watched in this period"
ROUTER = "a router serves no model and holds no GPUs"
HEALTHY = "no incidents, nothing at warning or worse"
WATCHED_LEAST = 0.1
"""Share of the period that must have been watched before a tier is called healthy: 17 h of a week.
A tier that is scaled to zero outside of office hours is watched for a quarter of it."""


def watched_words(period: Period) -> str:
    """How much of a period was watched, such as "only 3 min of 7 days were watched"."""
    watched, length = (
        span(length_s).replace(".0 ", " ")
        for length_s in (period.covered_s, period.to_s - period.from_s)
    )
    return f"only {watched} of {length} were watched"


class TierSections(Struct, frozen=True):
    """All sections of a tier. `period` has the seconds in which the tier was watched; `partial`:
    some queries had no complete answer."""

    tier: Tier
    period: Period
    partial: bool
    incidents: Sequence[Incident]
    tables: TierTables
    slo: TierSlo
    knee: TierKnee
    workload: TierWorkload
    size: TierSize
    money: TierMoney

    @property
    def watched_ratio(self) -> float:
        return self.period.covered_s / (self.period.to_s - self.period.from_s)

    @property
    def doubt(self) -> str:
        """Why a tier without problems is not called healthy; empty if it is."""
        if self.partial or self.watched_ratio >= WATCHED_LEAST:
            return "the data is partial" if self.partial else ""
        return watched_words(self.period)


def verdict(of: TierSections) -> WeeklyVerdict:
    """The verdict on a tier."""
    worst = severity(of)
    # Partial data can prove problems, not health.
    is_judged = of.watched_ratio > 0 and not (of.doubt and worst < Severity.WARNING)
    serious = [each for each in of.incidents if BY_WORD[each.severity] >= Severity.WARNING]
    return WeeklyVerdict(
        tier=of.tier.id,
        health=worst.word if serious or is_judged else "unknown",
        health_text=_health(of, serious),
        incidents=len(of.incidents),
        incident_s=_lasted_s(serious),
        size=of.size.verdict,
        size_text=ROUTER if of.tier.is_router else _size(of.size),
        money_text=ROUTER if of.tier.is_router else _money(of.money, of.size),
        action=_action(of, serious),
        trends=_trends(of),
    )


def severity(of: TierSections) -> Severity:
    """The worst severity of the tier's incidents and table rows."""
    words = (*(each.severity for each in of.incidents), *(row.state for row in _rows(of)))
    return max((BY_WORD.get(word, Severity.OK) for word in words), default=Severity.OK)


def _lasted_s(incidents: Sequence[Incident]) -> float:
    """Number of seconds in which at least one incident was active."""
    total = until_s = 0.0
    for incident in sorted(incidents, key=lambda incident: incident.start_s):
        total += max(0.0, incident.until_s - max(incident.start_s, until_s))
        until_s = max(until_s, incident.until_s)
    return total


def _held_s(incident: Incident) -> float:
    """Number of seconds of an incident; of an outage those in which no request was served, without
    what followed from it."""
    if incident.cause not in STOPPED:
        return _lasted_s([incident])
    return fsum(
        (incident.until_s if held.end_s is None else held.end_s) - held.start_s
        for held in incident.causes
        if held.id == incident.cause
    )


def _health(of: TierSections, serious: Sequence[Incident]) -> str:
    if not of.watched_ratio and not serious:
        return NOT_WATCHED
    if serious:
        first = max(serious, key=_rank)
        others = Counter(incident.title for incident in serious if incident is not first)
        named = [title if count == 1 else f"{title} ({count}x)" for title, count in others.items()]
        more = f"; also: {', '.join(named)}" if named else ""
        where = first.where if len(first.replicas) > 1 else first.target
        return f"{first.title} on {where} for {duration(_held_s(first))}{more}"
    rows = (row for row in _rows(of) if row.state in ("warning", "critical"))
    if bad := dict.fromkeys(f"{row.subject} is {row.state}" for row in rows):
        return "no incidents, but " + ", ".join(bad)
    return f"nothing at warning or worse, but {of.doubt}" if of.doubt else HEALTHY


def _rank(incident: Incident) -> tuple[Severity, float, float]:
    """Sort key of an incident: severity, then harm, then duration."""
    return BY_WORD[incident.severity], incident.cost.harmed_requests, _lasted_s([incident])


def _rows(of: TierSections) -> tuple[TableRow, ...]:
    return (*of.tables.monitoring, *of.tables.kv)


def _size(size: TierSize) -> str:
    present, needed = size.replicas_present, size.replicas_needed
    if not present:
        return f"unknown: {NOT_WATCHED}"
    doubt = size.doubts[0] if size.doubts else ""
    if needed is None:
        why = doubt or size.missing or "no request was served"
        if size.verdict == "too small":
            return f"too small: incidents of too little capacity; replicas needed unknown: {why}"
        return f"unknown: {why}"
    if size.verdict not in SIZED:
        return f"unknown: {doubt or 'too little data'}"
    text = f"{size.verdict}: {plural(present, 'replica')} present, the peak needs {needed}"
    if size.gpus_needed is not None:
        text += f" ({plural(size.gpus_needed, 'GPU')})"
    if size.headroom_ratio is not None and size.verdict != "too small":
        text += f", headroom {percent(size.headroom_ratio)}"
    return f"{text}; {doubt}" if doubt else text


def _money(money: TierMoney, size: TierSize) -> str:
    if money.usd.value is None:
        return f"unknown: {(money.missing if size.replicas_present else '') or NOT_WATCHED}"
    text = usd(money.usd.value)
    if money.usd_per_million_tokens.value is not None:
        text += f", {usd(money.usd_per_million_tokens.value)} per million generated tokens"
    if money.idle_usd is not None:
        text += f"; idle hours cost {usd(money.idle_usd)}"
    return f"{text}; {saving_words(money, size)}"


def saving_words(money: TierMoney, size: TierSize) -> str:
    """What can be saved at most, as text. Without the size that the load needs, it is unknown
    whether there is more."""
    best = money.savings[0] if money.savings else None
    if best is not None and best.saves_usd_per_month:
        return f"can save {usd(best.saves_usd_per_month)} a month: {first_sentence(best.summary)}"
    if size.verdict not in SIZED:
        return "savings unknown, like the size that the load needs"
    return "nothing to save: no recommendation costs less"


def _action(of: TierSections, serious: Sequence[Incident]) -> Action | None:
    """The first of these that exists: advice for the worst incident, more replicas, the incident
    itself, savings."""
    order, sized = sorted(serious, key=_rank, reverse=True), of.size.verdict in SIZED
    for incident in order:
        for advised in incident.advice:
            # The size for the peak is the one verdict on replicas; an incident saw its own load.
            resizes = any(change.flag == REPLICAS for change in advised.changes)
            if advised.fate in ("open", "lapsed") and not (sized and resizes):
                why = f"{incident.id}: {incident.title}"
                return Action(advised.summary, why, advised.id, advised.changes, incident.id)
    size = of.size
    if size.verdict == "too small" and size.replicas_needed is not None:
        text = f"run {plural(size.replicas_needed, 'replica')} instead of {size.replicas_present}"
        why = (
            f"the peak (P99) is {number(size.peak_requests_per_s)} requests/s, one engine serves "
            f"{number(size.usable_requests_per_s)}/s"
        )
        return Action(text, why, "", ())
    if order:
        first = order[0]
        why = first.evidence[0].text if first.evidence else ""
        return Action(f"investigate {first.id}: {first.title}", why, "", (), first.id)
    best = of.money.savings[0] if of.money.savings else None
    if best is not None and best.saves_usd_per_month:
        why = f"saves about {usd(best.saves_usd_per_month)} a month"
        return Action(best.summary, why, best.id, ())
    if size.verdict == "too large" and size.replicas_needed is not None:
        text = f"try {plural(size.replicas_needed, 'replica')} instead of {size.replicas_present}"
        return Action(text, f"the peak needs only {size.replicas_needed}", "", ())
    return None


def _trends(of: TierSections) -> tuple[Trend, ...]:
    """The figures that are shown below the verdict, with their trends."""
    ttft = next(latency for latency in of.slo.latencies if latency.name == "ttft")
    itl = next(latency for latency in of.slo.latencies if latency.name == "itl")
    return (
        of.slo.served_per_s,
        of.slo.goodput_per_s,
        replace(ttft.p99, name="TTFT P99"),
        replace(itl.p99, name="ITL P99"),
        of.money.tokens_per_gpu_hour,
        replace(of.money.usd_per_million_tokens, name="cost of generated tokens"),
    )
