"""A fleet's diagnosis as plain text and as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.fleet.diagnosis import FleetAdvice, FleetDiagnosis
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.replica_count import Split, TierSize
from kneewatch.diagnose.fleet.tier import FleetCause, Spread, Tier
from kneewatch.reports.diagnosis_text import AGAINST_SHOWN, VERDICTS, Style, escaped
from kneewatch.reports.formatting import (
    clock,
    date,
    duration,
    number,
    plural,
    printable,
    quantity,
    span,
    wrapped,
)
from kneewatch.reports.recommendation_text import changes_words, numbers_words
from kneewatch.rules.rule import Severity

ENGINES_SHOWN = 12
FLEET_EVIDENCE_SHOWN = 6
REPLICAS_SHOWN = 4
NOTES_SHOWN = 12


def text(found: FleetDiagnosis, style: Style) -> str:
    """The report of one moment."""
    observed = found.observed
    head = f"{VERDICTS[found.health]}  fleet at {observed.source}"
    lines = [style.paint(printable(head), found.health)]
    for row in (f"{date(observed.t_s)} {clock(observed.t_s)} UTC: {counts(found)}", *state(found)):
        lines += wrapped(row, width=style.width)
    for tier, size in zip(found.tiers, found.sizes, strict=True):
        lines += ["", *wrapped(tier_words(tier), width=style.width)]
        lines += wrapped(size_words(size), width=style.width, indent=3)
        for one in tier.spreads:
            lines += wrapped(spread_words(one), width=style.width, indent=3)
    for split in found.splits:
        lines += ["", *wrapped(split_words(split), width=style.width)]
    for place, cause in enumerate(found.causes, 1):
        lines += ["", *_cause(place, cause, style)]
    if found.advice:
        lines += ["", "to change:"]
        for advised in found.advice:
            lines += _advice(advised, style)
    worst = worst_engines(found)
    if worst:
        lines.append("")
        for engine in worst[:ENGINES_SHOWN]:
            lines += wrapped(engine_words(engine), width=style.width)
        if len(worst) > ENGINES_SHOWN:
            lines.append(f"and {len(worst) - ENGINES_SHOWN} more; --format json has them all")
    if found.notes:
        lines += ["", "could not be judged:"]
        for note in found.notes[:NOTES_SHOWN]:
            lines += wrapped(note, width=style.width, indent=3)
    return "\n".join(lines)


def counts(found: FleetDiagnosis) -> str:
    """How many engines are how."""
    words = [engine.health for engine in found.engines]
    told = [
        f"{words.count(word)} {word}"
        for word in ("critical", "warning", "info", "ok", "unknown")
        if word in words
    ]
    replicas = len({engine.member.replica for engine in found.engines})
    counted = f"{plural(replicas, 'replica')}, {plural(len(words), 'engine')}"
    return f"{counted}: {', '.join(told)}" if told else counted


def state(found: FleetDiagnosis) -> list[str]:
    """What a reader must know of the answer itself."""
    observed = found.observed
    used = f"{len(observed.recorded)} signals from recording rules" if observed.recorded else ""
    raw = f"{len(observed.raw)} from raw series, window {span(observed.window_s)}"
    rows = [f"signals: {', '.join(part for part in (used, raw) if part)}"]
    if found.lost:
        rows.insert(0, f"NOTHING IS KNOWN OF NOW: {found.lost}; below is what was seen last")
    rows += [f"PARTIAL ANSWER: {warning}" for warning in observed.warnings]
    if observed.failed:
        rows.append(f"PARTIAL ANSWER: {len(observed.failed)} queries failed")
    if observed.skew_s is not None:
        ahead = "ahead of" if observed.skew_s > 0 else "behind"
        rows.append(
            f"its clock is {duration(abs(observed.skew_s))} {ahead} this machine's; times here are "
            "its own"
        )
    return rows


def tier_words(tier: Tier) -> str:
    """A tier and its size."""
    engines = plural(len(tier.engines), "engine")
    return f"{tier.name}: {plural(tier.replicas, 'replica')}, {engines}"


def split_words(split: Split) -> str:
    """Prefill to decode of a tier: what is there, what the work asks for."""
    used = split.used
    where = f"{split.pool or '?'} on {split.tier}" if split.tier else split.pool or "?"
    return (
        f"{where}: {split.prefill}:{split.decode} replicas prefill and decode, the work is "
        f"{split.needed} (prefill {used[0]:.0%} taken, decode {used[1]:.0%})"
    )


def size_words(size: TierSize) -> str:
    """How many replicas a tier has and needs, by which peak, at what price."""
    needed = "unknown" if size.needed is None else str(size.needed)
    price = "" if size.usd_per_hour is None else f", {size.usd_per_hour:,.2f} USD/h now"
    parts = [f"replicas: {size.present} there, {needed} needed{price}"]
    if size.peak is not None:
        peak = size.peak
        parts.append(
            f"peak {number(peak.requests)} in flight at {date(peak.t_s)} {clock(peak.t_s)} UTC, "
            f"mean {number(peak.mean_requests)} of {span(peak.span_s * peak.seen_ratio)}"
        )
    return "; ".join([*parts, *([size.why] if size.why else [])])


def advice_words(one: FleetAdvice) -> list[str]:
    """A recommendation: the change and its price, why, what it would do, how to see that it did."""
    made = one.made
    rows = [f"{changes_words(made)} in {one.pool or '?'}" + (f" on {one.tier}" if one.tier else "")]
    rows.append(made.summary)
    if numbers := numbers_words(made):
        rows.append(f"expected: {numbers}")
    if made.unknown:
        rows.append(f"not known: {'; '.join(made.unknown)}")
    return [*rows, f"check before: {'; '.join(made.checks)}", f"verify: {'; '.join(made.verify)}"]


def spread_words(one: Spread) -> str:
    """A signal's spread: the worst and where it is, then the rest."""

    def told(value: float) -> str:
        return quantity(one.signal, value)

    unknown = f", {one.unknown} unknown" if one.unknown else ""
    if one.least == one.most:
        return f"{one.signal}: {told(one.most)} on all of {one.count}{unknown}"
    between = f"{told(one.least)} to {told(one.most)}, median {told(one.median)}"
    mean = f"mean {told(one.mean)} of {one.count}{unknown}"
    return f"{one.signal}: worst {told(one.worst_value)} ({one.worst}), {between}, {mean}"


def replica_words(replicas: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(replicas[:REPLICAS_SHOWN])
    more = len(replicas) - REPLICAS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def worst_engines(found: FleetDiagnosis) -> list[Engine]:
    """Engines that something is wrong with, and those that cannot be read."""
    return [e for e in found.engines if e.severity >= Severity.WARNING or e.health == "unknown"]


def engine_words(engine: Engine) -> str:
    """An engine in a line: health, stage, findings, a few numbers."""
    rules = ", ".join(f"{one.rule.id} {one.severity.word}" for one in engine.findings)
    numbers = ", ".join(
        f"{words} {quantity(key, value)}"
        for key, words in (("kv_usage_ratio", "KV"), ("running", "run"), ("waiting", "wait"))
        if (value := engine.get(key)) is not None
    )
    stage = (
        "stage unknown" if engine.stage is None else f"stage {engine.stage} ({engine.stage_name})"
    )
    parts = [part for part in (stage, rules, numbers) if part]
    return f"{engine.health.upper()} {engine.member.name}: {'; '.join(parts)}"


def where(one: FleetCause) -> str:
    """The pool and tier that a cause is about."""
    return f"{one.pool or '?'} on {one.tier}" if one.tier else one.pool or "?"


def _advice(one: FleetAdvice, style: Style) -> list[str]:
    head, *rows = advice_words(one)
    lines = wrapped(f"- {head}", width=style.width, indent=3)
    for row in rows:
        lines += wrapped(row, width=style.width, indent=5)
    return lines


def _cause(place: int, one: FleetCause, style: Style) -> list[str]:
    cause = one.cause
    head = f"{place}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    rows = [
        cause.summary,
        *(f"+ {item.text} [{item.signal}]" for item in cause.evidence[:FLEET_EVIDENCE_SHOWN]),
        *(f"- {item.text} [{item.signal}]" for item in cause.against[:AGAINST_SHOWN]),
        f"replicas: {replica_words(one.replicas)}",
        f"do first: {cause.lever}",
        f"guide: {', '.join(cause.guide)}" if cause.guide else "",
    ]
    lines = wrapped(f"{head} in {where(one)}", width=style.width, more=3)
    lines[0] = lines[0].replace(head, style.bold(head), 1)
    for row in rows:
        lines += wrapped(row, width=style.width, indent=3)
    return lines


# --- A fleet's diagnosis as Markdown, for a ticket or a chat --------------------------------------


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
        lines += ["", *_markdown_cause(place, cause)]
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


def _markdown_cause(place: int, one: FleetCause) -> list[str]:
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
