"""A fleet's verdict as text and as Markdown, and its pools on the triage page. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.tier import FleetCause, place
from kneewatch.diagnose.fleet.verdict import (
    LESS_IS_WORSE,
    EngineVerdict,
    FleetAdvice,
    FleetVerdict,
    Split,
    Spread,
    TierSize,
    TierVerdict,
    target_of,
)
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import changes_words
from kneewatch.reports import advice_text as advice
from kneewatch.reports.diagnosis_text import (
    BRIEF_NUMBERS,
    CAUSE,
    HEAD,
    ITEM,
    LEAD,
    LINE,
    SECTION,
    Row,
    Style,
    as_markdown,
    as_text,
    evidence_lines,
    server_words,
)
from kneewatch.reports.health import RANKS, counted_words
from kneewatch.reports.lines import printable
from kneewatch.reports.triage.view_model import ReplicaRow
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import (
    clock,
    date,
    duration,
    listed,
    number,
    percent,
    plural,
    quantity,
    span,
    stated_duration,
)
from kneewatch.rules.rule import OK, STATES, WARNING, Severity

ENGINES_SHOWN = 12
REPLICAS_SHOWN = 4
NOTES_SHOWN = 12


def text(fleet: FleetVerdict, style: Style) -> str:
    """The state of a fleet as text, the worst first."""
    return as_text(_rows(fleet, style), style)


def markdown(fleet: FleetVerdict, *, docs_url: str = "") -> str:
    """The state of a fleet as Markdown, the worst first."""
    return as_markdown(_rows(fleet, Style(docs_url=docs_url)))


def _rows(fleet: FleetVerdict, style: Style) -> list[Row]:
    head = printable(f"{fleet.health.upper()}  fleet at {fleet.source}")
    rows = [(HEAD, style.paint(head, fleet.health))]
    when = f"{date(fleet.t_s)} {clock(fleet.t_s)} UTC: {counts(fleet)}"
    rows += [(LINE, line) for line in (when, *state(fleet))]
    places, first = fleet.by_place(), dict[str, int]()
    for at, cause in enumerate(fleet.causes, 1):
        rows += _cause(at, cause, places[cause.pool, cause.tier], style, first)
    if fleet.advice:
        rows.append((SECTION, "recommendations:"))
    for advised in fleet.advice:
        change, *words = advice_words(advised, fleet.t_s)
        rows += [(LEAD, change), *((ITEM, line) for line in words)]
    worst = worst_engines(fleet)
    if worst:
        rows.append((SECTION, "worst engines:"))
    rows += [(ITEM, engine_words(engine)) for engine in worst[:ENGINES_SHOWN]]
    if len(worst) > ENGINES_SHOWN:
        rows.append((ITEM, f"and {len(worst) - ENGINES_SHOWN} more; --format json has them all"))
    rows += _tiers(fleet)
    if fleet.notes:
        rows.append((SECTION, "could not be judged:"))
    return rows + [(ITEM, note) for note in fleet.notes[:NOTES_SHOWN]]


def counts(fleet: FleetVerdict) -> str:
    """The number of replicas and engines, and the number in each health state."""
    states = [engine.health for engine in fleet.engines]
    tally = counted_words(states)
    total = f"{plural(fleet.replicas, 'replica')}, {plural(len(states), 'engine')}"
    return f"{total}: {tally}" if tally else total


def state(fleet: FleetVerdict) -> list[str]:
    """Lines with the source of the data, and with what is missing."""
    interval_s, skew_s = fleet.scrape_interval_s, fleet.clock_skew_s
    every = "" if interval_s is None else f", scraped every {stated_duration(interval_s)}"
    rows = [f"window {span(fleet.window_s)}{every}"]
    if fleet.lost:
        rows.insert(0, f"CURRENT STATE UNKNOWN: {fleet.lost}; below is the last known state")
    rows += [f"PARTIAL ANSWER: {warning}" for warning in fleet.warnings]
    if fleet.failed:
        rows.append(f"PARTIAL ANSWER: {len(fleet.failed)} queries failed")
    if skew_s is not None:
        ahead = "ahead of" if skew_s > 0 else "behind"
        rows.append(
            f"the source's clock is {duration(abs(skew_s))} {ahead} this machine's; times "
            "below are the source's"
        )
    return rows


def tier_words(tier: TierVerdict) -> str:
    engines = plural(tier.engines, "engine")
    return f"{tier.name}: {plural(tier.replicas, 'replica')}, {engines}"


def split_words(split: Split) -> str:
    """The prefill and decode replicas of a tier, compared with the numbers that its load needs."""
    return (
        f"{place(split.pool, split.tier)}: {split.prefill}:{split.decode} prefill:decode replicas, "
        f"the load needs {split.needed} (prefill {percent(split.prefill_used_ratio)} used, decode "
        f"{percent(split.decode_used_ratio)})"
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


def advice_words(change: FleetAdvice, t_s: float) -> list[str]:
    """Lines for a recommendation: the change, the reason, the predicted effect, and checks."""
    where = place(change.pool, change.tier)
    rows = [f"{changes_words(change)} in {where}", advice.why_words(change, t_s)]
    if numbers := advice.numbers_words(change):
        rows.append(f"{advice.EXPECTED}: {numbers}")
    if change.unknown:
        rows.append(f"unknown: {'; '.join(change.unknown)}")
    return [
        *rows,
        f"check before: {'; '.join(change.checks)}",
        f"verify: {'; '.join(change.verify)}",
    ]


def spread_words(signal: str, spread: Spread) -> str:
    """A signal over all engines of a tier: its highest value, or the lowest where less is worse,
    with its engine, then the range, median and mean."""

    def shown(value: float) -> str:
        return quantity(signal, value)

    unknown = f", {spread.unknown} unknown" if spread.unknown else ""
    if shown(spread.least) == shown(spread.most):
        on = spread.worst if spread.count == 1 else f"{'' if unknown else 'all '}{spread.count}"
        return f"{signal}: {shown(spread.most)} on {on}{unknown}"
    between = f"{shown(spread.least)} to {shown(spread.most)}, median {shown(spread.median)}"
    mean = "" if spread.mean is None else f", mean {shown(spread.mean)}"
    extreme = f"highest {shown(spread.most)}"
    if signal in LESS_IS_WORSE:
        extreme = f"lowest {shown(spread.least)}"
    return f"{signal}: {extreme} ({spread.worst}), {between}{mean} over {spread.count}{unknown}"


def worst_engines(fleet: FleetVerdict) -> list[EngineVerdict]:
    """Engines whose health is unknown, and engines at warning or worse that are graver than every
    cause they are listed under."""
    named: dict[tuple[str | None, str], Severity] = {}
    for cause in fleet.causes:
        for name in cause.replicas:
            key = cause.pool, name
            named[key] = max(named.get(key, OK), cause.severity)
    return [
        each
        for each in fleet.engines
        if each.health == "unknown"
        or (
            STATES[each.health] >= WARNING
            and STATES[each.health] > named.get((each.pool, each.name), OK)
        )
    ]


def engine_words(engine: EngineVerdict) -> str:
    """An engine in one line: health, causes, stage, findings, and the main numbers."""
    return f"{engine.health.upper()} {engine.name}: {engine_facts(engine)}"


def engine_facts(engine: EngineVerdict) -> str:
    """An engine's causes, stage, findings and main numbers."""
    rules = ", ".join(f"{finding.rule} {finding.severity.word}" for finding in engine.findings)
    numbers = ", ".join(
        words.format(shown(value))
        for key, words, shown in BRIEF_NUMBERS[:3]
        if (value := engine.values.get(key)) is not None
    )
    stage = "stage unknown"
    if engine.stage is not None:
        stage = f"stage {engine.stage.number} ({engine.stage.name})" if engine.stage.level else ""
    return "; ".join(part for part in (", ".join(engine.causes), stage, rules, numbers) if part)


def _tiers(fleet: FleetVerdict) -> list[Row]:
    """Rows about all tiers. Tiers with a problem come first and are shown in full; each of the
    others is one line."""
    troubled = {(c.pool, c.tier) for c in fleet.causes if c.severity >= WARNING}
    troubled |= {(change.pool, change.tier) for change in fleet.advice}
    ill = {(e.pool, e.tier, e.role) for e in worst_engines(fleet)}
    in_full: list[Row] = []
    in_a_line: list[Row] = [(ITEM, split_words(split)) for split in fleet.splits]
    for tier in fleet.tiers:
        if (
            not troubled.isdisjoint({(tier.pool, tier.tier), (tier.pool, None)})
            or (tier.pool, tier.tier, tier.role) in ill
        ):
            server = server_words(tier.server)
            in_full += [(SECTION, tier_words(tier)), (LEAD, size_words(tier.size))]
            in_full += [(ITEM, f"server: {server}")] if server else []
            in_full += [(ITEM, spread_words(*signal)) for signal in tier.signals.items()]
        else:
            in_a_line.append((ITEM, f"ok: {tier_words(tier)}; {size_words(tier.size)}"))
    return [
        *in_full,
        *([(SECTION, "other tiers:" if in_full else "tiers:")] if in_a_line else []),
        *in_a_line,
    ]


def _cause(
    at: int, cause: FleetCause, of_place: Verdict, style: Style, first: dict[str, int]
) -> list[Row]:
    """Rows for a cause of a place with this verdict. `first` maps sentences on what to do to the
    number of the first cause with them; later causes refer to this number."""
    head = f"{at}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    supporting, against = evidence_lines(cause)
    docs = cause_page(style.docs_url, cause.id)

    def once(words: str) -> str:
        same_as = first.setdefault(words, at)
        return words if same_as == at else f"same as {same_as}"

    items = (
        *(f"+ {line}" for line in supporting),
        *(f"- {line}" for line in against),
        f"replicas: {listed(cause.replicas, REPLICAS_SHOWN)}",
        *(
            f"{label}: {flags or once(words)}"
            for label, words, flags in advice.first_steps(of_place, cause)
        ),
        f"docs: {once(docs)}" if docs else "",
    )
    return [
        (CAUSE, f"{head} in {place(cause.pool, cause.tier)}"),
        (LEAD, cause.summary),
        *((ITEM, item) for item in items if item),
    ]


# --- A pool on the triage page --------------------------------------------------------------------


POOL_WORDS: Mapping[str, str] = {
    "kv_usage_ratio": "KV up to {}",
    "running": "{} running",
    "waiting": "{} waiting",
    "ttft_p99_s": "TTFT P99 up to {}",
    "itl_p99_s": "ITL P99 up to {}",
}
"""Words for a pool's signals: sums over its replicas, or the worst replica's value."""


def replica_rows(fleet: FleetVerdict, pool: str) -> list[ReplicaRow]:
    """The replicas of a pool, worst first."""
    own = sorted((e for e in fleet.engines if e.pool == pool), key=lambda e: RANKS[e.health])
    worst = {engine.replica: engine for engine in own}
    rows = [
        ReplicaRow(name, target_of(pool, name), engine.health, engine_facts(engine))
        for name, engine in worst.items()
    ]
    rows += [
        ReplicaRow(gone.replica, "", "unknown", "does not answer" if gone.down else "has no series")
        for gone in fleet.gone
        if gone.pool == pool and gone.replica not in worst
    ]
    return sorted(rows, key=lambda row: -RANKS[row.health])


def pool_facts(verdict: Verdict, rows: list[ReplicaRow], targets: Targets) -> list[str]:
    """Facts about a pool: its replicas by health, and its signals with their targets."""
    stated = {"ttft_p99_s": targets.ttft_p99_s, "itl_p99_s": targets.itl_p99_s}
    values = {key: verdict.values.get(key) for key in POOL_WORDS}
    return [
        f"{plural(len(rows), 'replica')}: {counted_words(row.health for row in rows)}",
        *(
            POOL_WORDS[key].format(quantity(key, value))
            + (
                ""
                if (most := stated.get(key)) is None
                else f" (target {quantity(key, most, stated=True)})"
            )
            for key, value in values.items()
            if value is not None
        ),
    ]
