"""The report on one page: the first three actions, what changed, and each tier in a line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from kneewatch.diagnose.recommend.advice import REPLICAS
from kneewatch.reports.health import RANKS
from kneewatch.reports.lines import first_sentence, usd
from kneewatch.reports.weekly.figures import ReportedFlag, Trend
from kneewatch.reports.weekly.page.formatting import HEALTH, Calendar, arrow, flag, health
from kneewatch.reports.weekly.report import Action, Tier, WeeklyReport, WeeklyVerdict
from kneewatch.reports.weekly.tier_sections import TierMoney
from kneewatch.rules.formatting import as_sentence, number, plural

STEPS_MOST, CHANGES_MOST = 3, 8
ON_CALL, SERVING, CAPACITY = "who is on call", "who runs the engines", "who owns the GPUs"


def title(report: WeeklyReport) -> str:
    week = Calendar(report.timezone, report.period).week
    return "Weekly health report" if week else "Health report"


def headline(report: WeeklyReport) -> tuple[str, str]:
    """The worst health state, and a sentence with the number of tiers in each state, worst
    first."""
    counts = Counter(health(verdict.health) for verdict in report.verdicts)
    if not counts:
        return "unknown", "No target was watched in this period: health unknown."
    states = sorted(counts, key=lambda state: -RANKS[state])
    tally = ", ".join(f"{counts[state]} {HEALTH[state].lower()}" for state in states)
    return states[0], f"{plural(len(report.tiers), 'tier')}: {tally}."


class Step(Struct, frozen=True):
    """An action for people: what to do and why, whose work it is, what it saves and what it takes.

    `text` is the change, or the advice if it changes no setting. `saving` is money or requests;
    empty if neither is known. `effort` is empty if it is not known.
    """

    tier: str
    text: str
    why: str
    changes: tuple[ReportedFlag, ...]
    owner: str
    saving: str
    effort: str

    @property
    def command(self) -> str:
        """The flags to set; empty without one."""
        return " ".join(
            f"{change.flag} {change.after}"
            for change in self.changes
            if change.flag.startswith("--")
        )


def first_steps(report: WeeklyReport) -> tuple[Step, ...]:
    """The first action of each tier, the worst tier first; at most three."""
    order = sorted(
        zip(report.verdicts, report.tiers, report.money, strict=True),
        key=lambda row: -RANKS[health(row[0].health)],
    )
    steps = (
        _step(verdict.action, verdict, tier, money, report)
        for verdict, tier, money in order
        if verdict.action is not None
    )
    return tuple(step for step, _ in zip(steps, range(STEPS_MOST), strict=False))


def _step(
    action: Action, verdict: WeeklyVerdict, tier: Tier, money: TierMoney, report: WeeklyReport
) -> Step:
    flags = [change for change in action.changes if change.flag.startswith("--")]
    resizes = any(change.flag == REPLICAS for change in action.changes)
    if flags:
        owner, effort = SERVING, f"a restart of {_restarted(action, tier, report)}"
    elif resizes or (not action.recommendation and verdict.size in ("too small", "too large")):
        owner, effort = CAPACITY, "a change of replicas"
    else:
        owner, effort = ON_CALL, ""
    why = [first_sentence(action.text)] if action.changes else []
    return Step(
        tier.id,
        _changed(action.changes) or first_sentence(action.text),
        " ".join((*why, as_sentence(action.why))),
        action.changes,
        owner,
        _saving(action, tier, money, report),
        effort,
    )


def _changed(changes: Sequence[ReportedFlag]) -> str:
    """The changes as an order, such as "Set --flag fp8 (now auto)." Empty without one."""
    resized = {change.flag: change for change in changes}.get(REPLICAS)
    if resized is not None and len(changes) == 1:
        return f"Run {plural(int(resized.after), 'replica')} instead of {resized.before}."
    words = ", ".join(map(flag, changes))
    return as_sentence(f"set {words}" if words.startswith("--") else words)


def _restarted(action: Action, tier: Tier, report: WeeklyReport) -> str:
    """The replica of the action's incident, or the number of engines to restart."""
    replicas = next((each.replicas for each in report.incidents if each.id == action.incident), ())
    if len(replicas) == 1:
        return replicas[0]
    return plural(len(replicas), "replica") if replicas else plural(tier.engines_present, "engine")


def _saving(action: Action, tier: Tier, money: TierMoney, report: WeeklyReport) -> str:
    for saving in money.savings:
        if saving.id == action.recommendation and saving.saves_usd_per_month:
            return f"saves {usd(saving.saves_usd_per_month)} a month"
    harmed = sum(
        each.cost.harmed_requests
        for each in report.incidents
        if each.tier == tier.id and action.incident in ("", each.id)
    )
    return f"{number(round(harmed))} requests preempted, late or lost" if harmed >= 1 else ""


def changed(report: WeeklyReport) -> tuple[tuple[str, Trend], ...]:
    """The figures by tier that changed by more than the noise against the period before."""
    return tuple(
        (verdict.tier, trend)
        for verdict in report.verdicts
        for trend in verdict.trends
        if arrow(trend)
    )
