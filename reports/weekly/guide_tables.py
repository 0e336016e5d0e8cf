"""The sizing guide's metric tables (9.3 and 7.7): which rules and causes cover each row, and the
values for one tier. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import UP, Trend
from kneewatch.reports.weekly.measures import Measure, Of, TierPeriod, trend
from kneewatch.reports.weekly.observed import Span, TierStated
from kneewatch.reports.weekly.report import TableRow, TierTables
from kneewatch.rules.formatting import percent
from kneewatch.rules.rule import Rule, Severity

FLEET = "Fleet utilization"


class Row(Struct, frozen=True):
    """A row of a guide table; guide_tables.toml explains the fields. `judges` maps ids of rules to
    the index of the figure that the rule judges."""

    section: str
    subject: str
    rules: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    figures: tuple[Measure, ...] = ()
    band: str = ""
    bound_by: str = ""
    how: str = ""
    low: float | None = None
    high: float | None = None
    judges: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    off: str = ""
    enable: str = ""
    gap: str = ""
    trend_only: bool = False


def _deferred_with_lora() -> Of:
    """A function that returns the number of deferred requests. None if no adapters are in use."""
    adapters, deferred = m.level(m.ADAPTER_CHANGES), m.level(m.DEFERRED)
    return lambda span: None if adapters(span) is None else deferred(span)


OF: Mapping[str, Callable[..., Of]] = {
    "deferred_with_lora": _deferred_with_lora,
    "level": m.level,
    "mean": m.mean,
    "quantile": m.quantile,
    "ratio": m.ratio,
    "saved": lambda: m.saved,
    "share_of_time": m.share_of_time,
    "top": m.top,
}
"""The functions that guide_tables.toml names."""

_TABLES = packaged_tables("reports.weekly", "guide_tables.toml")


def _figure(key: str, row: Mapping[str, Any]) -> Measure:
    kind, *arguments = row["of"]
    missing = row.get("missing", m.NO_REQUEST).format(gpu_source=m.GPU_SOURCE)
    name, good = row.get("name", ""), row.get("good", "")
    return Measure(key, name, row["unit"], OF[kind](*arguments), good, missing)


FIGURES = {key: _figure(key, row) for key, row in _TABLES["figures"].items()}
"""The figures that the rows of guide_tables.toml name, by key."""


def monitoring(gpus: int | None, rules: Mapping[str, Rule]) -> tuple[Row, ...]:
    """The rows of table 9.3. `gpus` is the number of GPUs per engine. `rules` are the active rules
    by id."""
    missing = "number of GPUs per engine unknown" if gpus is None else "no tokens counted"
    tokens = Measure("tokens_per_gpu_hour", "", "tokens", m.tokens_per_gpu_hour(gpus), UP, missing)
    return _rows("9.3", "monitoring", {**FIGURES, tokens.key: tokens}, rules)


def kv_metrics(rules: Mapping[str, Rule]) -> tuple[Row, ...]:
    """The rows of table 7.7. `rules` are the active rules by id."""
    return _rows("7.7", "kv", FIGURES, rules)


def _rows(
    section: str, name: str, figures: Mapping[str, Measure], rules: Mapping[str, Rule]
) -> tuple[Row, ...]:
    """The rows of a table of guide_tables.toml. Both tables have one target for evictions, the
    rule's, although the guide has 5% in 9.3 and 10% in 7.7."""
    rows: list[Row] = []
    for stated in _TABLES[name]:
        given: dict[str, Any] = {k: tuple(stated.get(k, ())) for k in ("rules", "causes")}
        given["figures"] = tuple(figures[key] for key in stated.get("figures", ()))
        row = Row(section, **{**stated, **given})
        rule = rules.get(row.bound_by)
        high = row.high if rule is None else rule.threshold(Severity.WARNING)
        if "{high}" in row.band:
            band = row.band.format(high=percent(high)) if high is not None else "near zero"
            row = replace(row, band=band)
        rows.append(replace(row, high=high, enable=row.enable.format(gpu_source=m.GPU_SOURCE)))
    return tuple(rows)


# --- The guide's tables filled in for one tier ----------------------------------------------------


BY_HIT_RATE = "PREFIX-HIT"
KNOWN_REUSE = 0.3
"""Minimum hit ratio in the period before for a workload to count as repeating its prefixes. The
guide's bound on hits applies only to such workloads."""


def tables(
    tier: str,
    stated: TierStated,
    now: TierPeriod,
    before: TierPeriod,
    *,
    worst: Mapping[str, Severity],
    c_max: float | None,
) -> TierTables:
    """The monitoring table and the KV metrics table of a tier, compared with the period before.

    `worst` is the worst severity of each cause in the incidents. `c_max` is the number of requests
    in flight at which an engine reaches its knee; None if unknown.
    """
    rules = {rule.id: rule for rule in stated.profile.rules}
    return TierTables(
        tier=tier,
        monitoring=tuple(
            _filled(_placed(row, now, c_max), now, before, rules, worst)
            for row in monitoring(stated.server.engine_gpus, rules)
        ),
        kv=tuple(_filled(row, now, before, rules, worst) for row in kv_metrics(rules)),
    )


def _placed(row: Row, now: TierPeriod, c_max: float | None) -> Row:
    """The row, unchanged unless it is the fleet utilization row and no GPU source has its value.

    That row then gets requests in flight divided by `c_max`, if `c_max` is known.
    """
    if row.subject != FLEET or c_max is None or now.value(row.figures[0]) is not None:
        return row

    def load(span: Span) -> float | None:
        running, waiting = m.level(m.RUNNING)(span), m.level(m.WAITING)(span)
        return None if running is None else (running + (waiting or 0.0)) / c_max

    return replace(
        row,
        figures=(
            Measure("load_ratio", "of the learned C_max", "ratio", load, missing=m.GPU_MISSING),
        ),
        how="requests in flight divided by the learned C_max, over all hours",
    )


def _filled(
    row: Row,
    now: TierPeriod,
    before: TierPeriod,
    rules: Mapping[str, Rule],
    worst: Mapping[str, Severity],
) -> TableRow:
    figures = tuple(trend(measure, now, before) for measure in row.figures)
    state, advice = _state(row, figures, rules, worst)
    has_value = figures[0].value is not None
    return TableRow(
        section=row.section,
        subject=row.subject,
        figures=figures,
        band=row.band,
        low=row.low,
        high=row.high,
        state=state,
        advice=advice,
        missing="" if has_value else row.off if state == "off" else figures[0].missing,
        enable="" if has_value and (state != "trend" or row.trend_only) else row.enable,
        how=row.how,
        rules=row.rules,
        causes=row.causes,
        spark=now.spark(row.figures[-1]) if has_value else None,
    )


def _state(
    row: Row,
    figures: tuple[Trend, ...],
    rules: Mapping[str, Rule],
    worst: Mapping[str, Severity],
) -> tuple[str, str]:
    """The state of a row, and the advice for it."""
    if figures[0].value is None:
        return ("off" if row.off else "unknown"), ""
    state, advice, judged = Severity.OK, "", False
    for rule_id, at in row.judges.items():
        rule, value = rules.get(rule_id), figures[at].value
        if rule is None or value is None:
            continue
        judged = True
        severity = rule.level(value)
        reused_before = (figures[at].before or 0.0) >= KNOWN_REUSE
        if rule_id == BY_HIT_RATE and not reused_before:
            severity = Severity.OK
        if severity > state:
            state, advice = severity, rule.advice
    for cause in row.causes:
        severity = worst.get(cause, Severity.OK)
        if severity > state:
            state, advice = severity, f"see incidents: {cause}"
    if row.trend_only or (not judged and row.judges and state == Severity.OK):
        return "trend", ""
    return state.word, advice
