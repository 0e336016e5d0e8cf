"""A fleet's diagnosis as text, Markdown and JSON: schema kneewatch.fleet/1 (docs/how-to/fleet.md).
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, json
from msgspec.structs import asdict

from kneewatch.diagnose.deployment.server_facts import ServerFacts
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.diagnosis import FleetAdvice, FleetDiagnosis
from kneewatch.diagnose.fleet.engine import Engine
from kneewatch.diagnose.fleet.replica_count import Split, TierSize
from kneewatch.diagnose.fleet.tier import FleetCause, Spread, Tier
from kneewatch.diagnose.recommend.recommendation import in_document
from kneewatch.reports.diagnosis_text import AGAINST_SHOWN, Style, escaped, server_words
from kneewatch.reports.recommendation_text import changes_words, numbers_words
from kneewatch.rules.formatting import (
    clock,
    date,
    duration,
    number,
    percent,
    plural,
    printable,
    quantity,
    span,
    wrapped,
)
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import rounded

SCHEMA = "kneewatch.fleet/1"


def document(diagnosis: FleetDiagnosis, *, docs_url: str = "") -> dict[str, Any]:
    """The JSON document. Later versions may add keys but never remove any.

    With `docs_url`, each cause contains the address of its page.
    """
    observed = diagnosis.observed
    return {
        "schema": SCHEMA,
        "t": observed.t_s,
        "source": observed.source,
        "window_s": observed.window_s,
        "scrape_interval_s": rounded(observed.scrape_interval_s),
        "health": diagnosis.health,
        "partial": diagnosis.partial,
        "lost": diagnosis.lost or None,
        "clock_skew_s": observed.skew_s,
        "replicas": len({engine.member.replica for engine in diagnosis.engines}),
        "engines": len(diagnosis.engines),
        "tiers": [
            {**_tier_document(tier, size), "server": plain(server.at(observed.t_s))}
            for tier, size, server in zip(
                diagnosis.tiers, diagnosis.sizes, diagnosis.servers, strict=True
            )
        ],
        "causes": [_cause_document(cause, docs_url) for cause in diagnosis.causes],
        "recommendations": [
            {
                **plain(in_document(advice.recommendation)),
                "pool": advice.pool,
                "tier": advice.tier or None,
            }
            for advice in diagnosis.advice
        ],
        "splits": [
            {
                "pool": split.pool,
                "tier": split.tier or None,
                "prefill_replicas": split.prefill,
                "decode_replicas": split.decode,
                "needed": split.needed,
                "prefill_used_ratio": rounded(split.used[0]),
                "decode_used_ratio": rounded(split.used[1]),
            }
            for split in diagnosis.splits
        ],
        "targets": [_engine(engine) for engine in diagnosis.engines],
        "gone": [
            {"replica": replica.replica, "pool": replica.pool, "down": replica.down}
            for replica in observed.gone
        ],
        "recorded": [],
        "raw": sorted({key for engine in diagnosis.engines for key in engine.values}),
        "warnings": list(observed.warnings),
        "unknown": list(diagnosis.notes),
        "load": {
            "queries": observed.load.queries,
            "retried": observed.load.retried,
            "seconds": round(observed.load.seconds, 3),
        },
    }


def plain(record: Struct) -> dict[str, Any]:
    """A record as JSON's own types: its tuples become lists."""
    decoded: dict[str, Any] = json.decode(json.encode(record))
    return decoded


def _tier_document(tier: Tier, size: TierSize) -> dict[str, Any]:
    return {
        "pool": tier.pool,
        "tier": tier.tier or None,
        "role": tier.role or None,
        "size": _size(size),
        "replicas": tier.replicas,
        "engines": len(tier.engines),
        "signals": {spread.signal: _spread(spread) for spread in tier.spreads},
    }


def _size(size: TierSize) -> dict[str, Any]:
    peak = size.peak
    return {
        "replicas": size.present,
        "recommended": size.needed,
        "why": size.why,
        "used_ratio": rounded(size.used_ratio),
        "gpus_per_replica": size.gpus_each,
        "usd_per_hour": rounded(size.usd_per_hour),
        "peak": None
        if peak is None
        else {
            "requests": rounded(peak.requests),
            "t": peak.t_s,
            "mean_requests": rounded(peak.mean_requests),
            "span_s": peak.span_s,
            "seen_ratio": rounded(peak.seen_ratio),
        },
    }


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "count": spread.count,
        "unknown": spread.unknown,
        "min": spread.least,
        "median": spread.median,
        "mean": spread.mean,
        "max": spread.most,
        "worst": spread.worst,
    }


def _cause_document(fleet_cause: FleetCause, docs_url: str) -> dict[str, Any]:
    cause = fleet_cause.cause
    docs = cause_page(docs_url, cause.id)
    return {
        "id": cause.id,
        "confidence": cause.confidence,
        "severity": cause.severity.word,
        "pool": fleet_cause.pool,
        "tier": fleet_cause.tier or None,
        "replicas": list(fleet_cause.replicas),
        "summary": cause.summary,
        "explains": list(cause.explains),
        "lever": cause.lever,
        "evidence": [asdict(item) for item in cause.evidence],
        "against": [asdict(item) for item in cause.against],
        "guide": list(cause.guide),
        **({"docs": docs} if docs else {}),
    }


def _engine(engine: Engine) -> dict[str, Any]:
    member = engine.member
    return {
        "replica": member.replica,
        "engine": member.engine or None,
        "model": member.model,
        "pool": member.pool,
        "tier": member.tier or None,
        "role": member.role or None,
        "node": member.node or None,
        "health": engine.health,
        "stage": None
        if engine.stage is None
        else {"number": engine.stage, "name": engine.stage_name},
        "findings": [
            {
                "rule": finding.rule,
                "state": finding.severity.word,
                "signal": finding.signal,
                "value": finding.value,
            }
            for finding in engine.findings
        ],
        "causes": [cause.id for cause in engine.causes],
        "signals": {k: v for k, v in sorted(engine.values.items()) if math.isfinite(v)},
    }


# --- A fleet's diagnosis as plain text and as Markdown --------------------------------------------


ENGINES_SHOWN = 12
FLEET_EVIDENCE_SHOWN = 6
REPLICAS_SHOWN = 4
NOTES_SHOWN = 12


def text(diagnosis: FleetDiagnosis, style: Style) -> str:
    """The state of a fleet as text, the worst first."""
    observed = diagnosis.observed
    head = f"{diagnosis.health.upper()}  fleet at {observed.source}"
    lines = [style.paint(printable(head), diagnosis.health)]
    for row in (
        f"{date(observed.t_s)} {clock(observed.t_s)} UTC: {counts(diagnosis)}",
        *state(diagnosis),
    ):
        lines += wrapped(row, width=style.width)
    first_places: dict[str, int] = {}
    for place, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_cause(place, cause, style, first_places)]
    if diagnosis.advice:
        lines += ["", "recommendations:"]
        for advised in diagnosis.advice:
            lines += _advice(advised, style)
    worst = worst_engines(diagnosis)
    if worst:
        lines.append("")
        for engine in worst[:ENGINES_SHOWN]:
            lines += wrapped(engine_words(engine), width=style.width)
        if len(worst) > ENGINES_SHOWN:
            lines.append(f"and {len(worst) - ENGINES_SHOWN} more; --format json has them all")
    lines += _tiers(diagnosis, style)
    if diagnosis.notes:
        lines += ["", "could not be judged:"]
        for note in diagnosis.notes[:NOTES_SHOWN]:
            lines += wrapped(note, width=style.width, indent=3)
    return "\n".join(lines)


def counts(diagnosis: FleetDiagnosis) -> str:
    """The number of replicas and engines, and the number in each health state."""
    states = [engine.health for engine in diagnosis.engines]
    tally = [
        f"{states.count(state)} {state}"
        for state in ("critical", "warning", "info", "ok", "unknown")
        if state in states
    ]
    replicas = len({engine.member.replica for engine in diagnosis.engines})
    total = f"{plural(replicas, 'replica')}, {plural(len(states), 'engine')}"
    return f"{total}: {', '.join(tally)}" if tally else total


def state(diagnosis: FleetDiagnosis) -> list[str]:
    """Lines with the source of the data, and with what is missing."""
    observed = diagnosis.observed
    interval_s = observed.scrape_interval_s
    every = "" if interval_s is None else f", scraped every {duration(interval_s)}"
    rows = [f"window {span(observed.window_s)}{every}"]
    if diagnosis.lost:
        rows.insert(0, f"CURRENT STATE UNKNOWN: {diagnosis.lost}; below is the last known state")
    rows += [f"PARTIAL ANSWER: {warning}" for warning in observed.warnings]
    if observed.failed:
        rows.append(f"PARTIAL ANSWER: {len(observed.failed)} queries failed")
    if observed.skew_s is not None:
        ahead = "ahead of" if observed.skew_s > 0 else "behind"
        rows.append(
            f"the source's clock is {duration(abs(observed.skew_s))} {ahead} this machine's; times "
            "below are the source's"
        )
    return rows


def tier_words(tier: Tier) -> str:
    """The name of a tier, and the number of its replicas and engines."""
    engines = plural(len(tier.engines), "engine")
    return f"{tier.name}: {plural(tier.replicas, 'replica')}, {engines}"


def split_words(split: Split) -> str:
    """The prefill and decode replicas of a tier, compared with the numbers that its load needs."""
    used = split.used
    where = f"{split.pool or '?'} on {split.tier}" if split.tier else split.pool or "?"
    return (
        f"{where}: {split.prefill}:{split.decode} prefill:decode replicas, the load needs "
        f"{split.needed} (prefill {percent(used[0])} used, decode {percent(used[1])})"
    )


def size_words(size: TierSize) -> str:
    """The number of replicas that a tier has and needs, its peak load, and its cost."""
    needed = "unknown" if size.needed is None else str(size.needed)
    price = "" if size.usd_per_hour is None else f", {size.usd_per_hour:,.2f} USD/h now"
    parts = [f"replicas: {size.present} running, {needed} needed{price}"]
    if size.peak is not None:
        peak = size.peak
        parts.append(
            f"peak {number(peak.requests)} running at {date(peak.t_s)} {clock(peak.t_s)} UTC, "
            f"mean {number(peak.mean_requests)} over {span(peak.span_s * peak.seen_ratio)}"
        )
    return "; ".join([*parts, *([size.why] if size.why else [])])


def advice_words(advice: FleetAdvice) -> list[str]:
    """Lines for a recommendation: the change, the reason, the predicted effect, and checks."""
    recommendation = advice.recommendation
    tier = f" on {advice.tier}" if advice.tier else ""
    rows = [
        f"{changes_words(recommendation)} in {advice.pool or '?'}{tier}",
        recommendation.summary,
    ]
    if numbers := numbers_words(recommendation):
        rows.append(f"expected: {numbers}")
    if recommendation.unknown:
        rows.append(f"unknown: {'; '.join(recommendation.unknown)}")
    return [
        *rows,
        f"check before: {'; '.join(recommendation.checks)}",
        f"verify: {'; '.join(recommendation.verify)}",
    ]


def spread_words(spread: Spread) -> str:
    """A signal over all engines of a tier: the worst value with its engine, then the range, median
    and mean."""

    def shown(value: float) -> str:
        return quantity(spread.signal, value)

    unknown = f", {spread.unknown} unknown" if spread.unknown else ""
    if spread.least == spread.most:
        return f"{spread.signal}: {shown(spread.most)} on all {spread.count}{unknown}"
    between = f"{shown(spread.least)} to {shown(spread.most)}, median {shown(spread.median)}"
    mean = f"mean {shown(spread.mean)} over {spread.count}{unknown}"
    return f"{spread.signal}: worst {shown(spread.worst_value)} ({spread.worst}), {between}, {mean}"


def replica_words(replicas: Sequence[str]) -> str:
    """The names of the first replicas, and the number of further ones."""
    shown = ", ".join(replicas[:REPLICAS_SHOWN])
    more = len(replicas) - REPLICAS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def worst_engines(diagnosis: FleetDiagnosis) -> list[Engine]:
    """Engines whose health is unknown, and engines at warning or worse that are not listed under a
    cause at warning or worse."""
    named = {
        (c.pool, name)
        for c in diagnosis.causes
        if c.cause.severity >= Severity.WARNING
        for name in c.replicas
    }
    return [
        e
        for e in diagnosis.engines
        if e.health == "unknown"
        or (e.severity >= Severity.WARNING and (e.member.pool, e.member.name) not in named)
    ]


def engine_words(engine: Engine) -> str:
    """An engine in one line: health, causes, stage, findings, and the main numbers."""
    rules = ", ".join(f"{finding.rule} {finding.severity.word}" for finding in engine.findings)
    numbers = ", ".join(
        f"{words} {quantity(key, value)}"
        for key, words in (("kv_usage_ratio", "KV"), ("running", "run"), ("waiting", "wait"))
        if (value := engine.get(key)) is not None
    )
    causes = ", ".join(cause.id for cause in engine.causes)
    stage = f"stage {engine.stage} ({engine.stage_name})" if engine.stage else ""
    if engine.stage is None:
        stage = "stage unknown"
    parts = [part for part in (causes, stage, rules, numbers) if part]
    return f"{engine.health.upper()} {engine.member.name}: {'; '.join(parts)}"


def where(cause: FleetCause) -> str:
    """The pool and tier of a cause."""
    return f"{cause.pool or '?'} on {cause.tier}" if cause.tier else cause.pool or "?"


def _advice(advice: FleetAdvice, style: Style) -> list[str]:
    head, *rows = advice_words(advice)
    lines = wrapped(f"- {head}", width=style.width, indent=3)
    for row in rows:
        lines += wrapped(row, width=style.width, indent=5)
    return lines


def _tiers(diagnosis: FleetDiagnosis, style: Style) -> list[str]:
    """Lines about all tiers. Tiers with a problem come first and are shown in full; each of the
    others is one line."""
    troubled = {(c.pool, c.tier) for c in diagnosis.causes if c.cause.severity >= Severity.WARNING}
    troubled |= {(advice.pool, advice.tier) for advice in diagnosis.advice}
    ill = {e.member.group for e in worst_engines(diagnosis)}
    in_full: list[str] = []
    in_a_line: list[str] = []
    for tier, size, server in zip(diagnosis.tiers, diagnosis.sizes, diagnosis.servers, strict=True):
        if (
            not troubled.isdisjoint({(tier.pool, tier.tier), (tier.pool, "")})
            or (tier.pool, tier.tier, tier.role) in ill
        ):
            in_full += ["", *wrapped(tier_words(tier), width=style.width)]
            in_full += wrapped(size_words(size), width=style.width, indent=3)
            if words := server_words(server.at(diagnosis.observed.t_s)):
                in_full += wrapped(f"server: {words}", width=style.width, indent=3)
            for spread in tier.spreads:
                in_full += wrapped(spread_words(spread), width=style.width, indent=3)
        else:
            row = f"ok: {tier_words(tier)}; {size_words(size)}"
            in_a_line += wrapped(row, width=style.width)
    splits = [line for s in diagnosis.splits for line in wrapped(split_words(s), width=style.width)]
    return [*in_full, *([""] if in_a_line or splits else []), *splits, *in_a_line]


def _cause(
    place: int, fleet_cause: FleetCause, style: Style, first_places: dict[str, int]
) -> list[str]:
    """Lines for a cause. `first_places` maps each advice to the number of the first cause with that
    advice; later causes refer to this number."""
    cause = fleet_cause.cause
    first = first_places.setdefault(cause.lever, place)
    head = f"{place}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    rows = [
        cause.summary,
        *(f"+ {item.text} [{item.signal}]" for item in cause.evidence[:FLEET_EVIDENCE_SHOWN]),
        *(f"- {item.text} [{item.signal}]" for item in cause.against[:AGAINST_SHOWN]),
        f"replicas: {replica_words(fleet_cause.replicas)}",
        f"do first: {cause.lever if first == place else f'same as {first}'}",
        *(
            [f"docs: {docs}"]
            if first == place and (docs := cause_page(style.docs_url, cause.id))
            else []
        ),
    ]
    lines = wrapped(f"{head} in {where(fleet_cause)}", width=style.width, more=3)
    lines[0] = lines[0].replace(head, style.bold(head), 1)
    for row in rows:
        lines += wrapped(row, width=style.width, indent=3)
    return lines


# --- Markdown, for a ticket or a chat -------------------------------------------------------------


def markdown(diagnosis: FleetDiagnosis, *, docs_url: str = "") -> str:
    """The state of a fleet as Markdown, the worst first."""
    observed = diagnosis.observed
    lines = [
        f"## {diagnosis.health.upper()}: fleet at {escaped(observed.source)}",
        "",
        f"{date(observed.t_s)} {clock(observed.t_s)} UTC. {escaped(counts(diagnosis))}.",
        *(f"- {escaped(row)}" for row in state(diagnosis)),
    ]
    for place, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_markdown_cause(place, cause, docs_url)]
    if diagnosis.advice:
        lines += ["", "### Recommendations", ""]
        for advice in diagnosis.advice:
            head, *rows = advice_words(advice)
            lines += [f"- {escaped(head)}", *(f"  - {escaped(row)}" for row in rows)]
    for tier, size, server in zip(diagnosis.tiers, diagnosis.sizes, diagnosis.servers, strict=True):
        lines += ["", *_tier(tier, size, server)]
    worst = worst_engines(diagnosis)
    if worst:
        lines += ["", "### Worst engines", ""]
        lines += [f"- {escaped(engine_words(engine))}" for engine in worst[:ENGINES_SHOWN]]
        if len(worst) > ENGINES_SHOWN:
            lines.append(f"- and {len(worst) - ENGINES_SHOWN} more")
    if diagnosis.notes:
        lines += ["", "### Could not be judged", "", *(f"- {escaped(n)}" for n in diagnosis.notes)]
    return "\n".join(lines)


def _markdown_cause(place: int, fleet_cause: FleetCause, docs_url: str) -> list[str]:
    cause = fleet_cause.cause
    return [
        f"### {place}. `{cause.id}` ({cause.severity.word}, confidence {cause.confidence:.2f}): "
        f"{escaped(where(fleet_cause))}",
        "",
        escaped(cause.summary),
        "",
        *(f"- for: {escaped(item.text)} (`{item.signal}`)" for item in cause.evidence),
        *(f"- against: {escaped(item.text)} (`{item.signal}`)" for item in cause.against),
        f"- replicas: {escaped(replica_words(fleet_cause.replicas))}",
        f"- do first: {escaped(cause.lever)}",
        *([f"- docs: <{docs}>"] if (docs := cause_page(docs_url, cause.id)) else []),
    ]


def _tier(tier: Tier, size: TierSize, server: ServerFacts) -> list[str]:
    facts = server_words(server.at(0.0))
    return [
        f"### {escaped(tier_words(tier))}",
        "",
        escaped(size_words(size)),
        *(["", f"Server: {escaped(facts)}"] if facts else []),
        "",
        "| signal | worst | where | min | median | mean | max | engines | unknown |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(spread) for spread in tier.spreads),
    ]


def _row(spread: Spread) -> str:
    cells = [
        f"`{spread.signal}`",
        quantity(spread.signal, spread.worst_value),
        escaped(spread.worst),
        quantity(spread.signal, spread.least),
        quantity(spread.signal, spread.median),
        quantity(spread.signal, spread.mean),
        quantity(spread.signal, spread.most),
        str(spread.count),
        str(spread.unknown),
    ]
    return f"| {' | '.join(cells)} |"
