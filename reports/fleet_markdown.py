"""A fleet's diagnosis as Markdown, for a ticket or a chat. Pure."""

from __future__ import annotations

from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis
from kneewatch.diagnose.fleet.sizing import TierSize
from kneewatch.diagnose.fleet.spread import Spread
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier
from kneewatch.reports.fleet_text import (
    ENGINES_SHOWN,
    advice_words,
    counts,
    engine_words,
    replica_words,
    size_words,
    state,
    tier_words,
    where,
    worst_engines,
)
from kneewatch.reports.markdown import escaped
from kneewatch.reports.text import VERDICTS
from kneewatch.reports.words import clock, date, quantity


def markdown(found: FleetDiagnosis) -> str:
    """The report of one moment."""
    observed = found.observed
    lines = [
        f"## {VERDICTS[found.health]}: fleet at {escaped(observed.source)}",
        "",
        f"{date(observed.t_s)} {clock(observed.t_s)} UTC. {escaped(counts(found))}.",
        *(f"- {escaped(row)}" for row in state(found)),
    ]
    for place, cause in enumerate(found.causes, 1):
        lines += ["", *_cause(place, cause)]
    if found.advice:
        lines += ["", "### To change", ""]
        for one in found.advice:
            head, *rows = advice_words(one)
            lines += [f"- {escaped(head)}", *(f"  - {escaped(row)}" for row in rows)]
    for tier, size in zip(found.tiers, found.sizes, strict=True):
        lines += ["", *_tier(tier, size)]
    worst = worst_engines(found)
    if worst:
        lines += ["", "### Worst engines", ""]
        lines += [f"- {escaped(engine_words(engine))}" for engine in worst[:ENGINES_SHOWN]]
        if len(worst) > ENGINES_SHOWN:
            lines.append(f"- and {len(worst) - ENGINES_SHOWN} more")
    if found.notes:
        lines += ["", "### Could not be judged", "", *(f"- {escaped(n)}" for n in found.notes)]
    return "\n".join(lines)


def _cause(place: int, one: FleetCause) -> list[str]:
    cause = one.cause
    return [
        f"### {place}. `{cause.id}` ({cause.severity.word}, confidence {cause.confidence:.2f}): "
        f"{escaped(where(one))}",
        "",
        escaped(cause.summary),
        "",
        *(f"- for: {escaped(item.text)} (`{item.signal}`)" for item in cause.evidence),
        *(f"- against: {escaped(item.text)} (`{item.signal}`)" for item in cause.against),
        f"- replicas: {escaped(replica_words(one.replicas))}",
        f"- do first: {escaped(cause.lever)}",
    ]


def _tier(tier: Tier, size: TierSize) -> list[str]:
    return [
        f"### {escaped(tier_words(tier))}",
        "",
        escaped(size_words(size)),
        "",
        "| signal | worst | where | least | median | mean | most | engines | unknown |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(one) for one in tier.spreads),
    ]


def _row(one: Spread) -> str:
    cells = [
        f"`{one.signal}`",
        quantity(one.signal, one.worst_value),
        escaped(one.worst),
        quantity(one.signal, one.least),
        quantity(one.signal, one.median),
        quantity(one.signal, one.mean),
        quantity(one.signal, one.most),
        str(one.count),
        str(one.unknown),
    ]
    return f"| {' | '.join(cells)} |"
