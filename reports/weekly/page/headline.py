"""What the report and its sections are called, and the report in a sentence. Pure."""

from __future__ import annotations

from collections import Counter

from kneewatch.reports.weekly.model import WeeklyReport
from kneewatch.reports.weekly.page.moments import Calendar
from kneewatch.reports.weekly.page.telling import RANKS, health

SECTIONS = (
    ("verdict", "Verdict"),
    ("incidents", "Incidents"),
    ("tables", "The guide's tables"),
    ("slo", "Service levels"),
    ("knee", "The knee"),
    ("workload", "Workload"),
    ("size", "Size"),
    ("money", "Money"),
    ("track-record", "Track record"),
    ("data-quality", "Data quality"),
)
"""The sections in reading order: anchor and heading."""

ROWS_MOST = 100
"""Longer lists are cut, and say so: the JSON has all."""

WORDS = {
    "critical": ("was in trouble", "were in trouble"),
    "warning": ("needs attention", "need attention"),
    "unknown": ("cannot be judged", "cannot be judged"),
    "info": ("is healthy, with a note", "are healthy, with a note"),
    "ok": ("is healthy", "are healthy"),
}


def title(report: WeeklyReport) -> str:
    """What the report is called."""
    week = Calendar(report.timezone, report.period).week
    return "Weekly health report" if week else "Health report"


def headline(report: WeeklyReport) -> tuple[str, str]:
    """The worst health there is, and how many tiers stand how, the worst first."""
    by_tier = {verdict.tier: health(verdict.health) for verdict in report.verdicts}
    found = Counter(by_tier.get(tier.id, "unknown") for tier in report.tiers)
    if not found:
        return "unknown", "Nothing was watched in this time: nothing can be said of its health."
    words = sorted(found, key=lambda word: -RANKS[word])
    if len(words) == 1:
        count = found[words[0]]
        who = {1: "The one tier", 2: "Both tiers"}.get(count, f"All {count} tiers")
        return words[0], f"{who} {WORDS[words[0]][count > 1]}."
    parts = [f"{found[word]} {WORDS[word][found[word] > 1]}" for word in words]
    first, *rest = parts
    return words[0], f"Of {len(report.tiers)} tiers, {first}; {', '.join(rest)}."
