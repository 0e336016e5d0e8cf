"""The guide's tables filled in for one tier. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import Trend
from kneewatch.reports.weekly.observed import TierStated
from kneewatch.reports.weekly.rows import RowSpec, rows, with_load
from kneewatch.reports.weekly.service import TableRow, TierTables
from kneewatch.reports.weekly.spans import Span
from kneewatch.reports.weekly.trends import Measure, Past, trend
from kneewatch.rules.library.latency import slo_rules
from kneewatch.rules.model import Rule, Severity

FLEET = "Fleet utilization"
BY_HIT_RATE = ("PREFIX-HIT",)
KNOWN_REUSE = 0.3
"""The guide's bound on hits is for workloads that are known to repeat prefixes."""


def tables(
    tier: str,
    stated: TierStated,
    now: Past | None,
    before: Past | None,
    *,
    worst: Mapping[str, Severity],
    c_max: float | None,
) -> TierTables:
    """Both tables. `worst` are the tier's incidents by cause; `c_max` what an engine carries."""
    rules = {rule.id: rule for rule in (*_slo(stated), *stated.rules)}
    monitoring, kv = rows(stated.gpus)
    return TierTables(
        tier=tier,
        monitoring=tuple(
            _row(_placed(spec, now, c_max), now, before, rules, worst) for spec in monitoring
        ),
        kv=tuple(_row(spec, now, before, rules, worst) for spec in kv),
    )


def _slo(stated: TierStated) -> tuple[Rule, ...]:
    targets = stated.targets
    return slo_rules(ttft_p99_s=targets.ttft_p99_s, itl_p99_s=targets.itl_p99_s)


def _placed(spec: RowSpec, now: Past | None, c_max: float | None) -> RowSpec:
    """The fleet's utilization by load where no GPU is read and the load is known."""
    if spec.row.subject != FLEET or c_max is None or now is None:
        return spec
    if now.value(spec.figures[0]) is not None:
        return spec

    def load(span: Span) -> float | None:
        running, waiting = m.level(m.RUNNING)(span), m.level(m.WAITING)(span)
        return None if running is None else (running + (waiting or 0.0)) / c_max

    return with_load(
        spec, Measure("load_ratio", "of the learned C_max", "ratio", load, missing=m.GPU_MISSING)
    )


def _row(
    spec: RowSpec,
    now: Past | None,
    before: Past | None,
    rules: Mapping[str, Rule],
    worst: Mapping[str, Severity],
) -> TableRow:
    figures = tuple(trend(measure, now, before) for measure in spec.figures)
    state, advice = _state(spec, figures, rules, before, worst)
    known = figures[0].value is not None
    last = spec.figures[-1]
    shown = now.spark(last) if now is not None and known else None
    low, high = _band(spec, rules)
    return TableRow(
        section=spec.row.section,
        subject=spec.row.subject,
        figures=figures,
        band=spec.band,
        low=low,
        high=high,
        state=state,
        advice=advice,
        missing="" if known else _missing(spec, state, figures[0]),
        enable=spec.enable if not known or state == "trend" else "",
        how=spec.how,
        rules=spec.row.rules,
        causes=spec.row.causes,
        spark=shown,
    )


def _missing(spec: RowSpec, state: str, figure: Trend) -> str:
    return spec.off if state == "off" else figure.missing


def _state(
    spec: RowSpec,
    figures: tuple[Trend, ...],
    rules: Mapping[str, Rule],
    before: Past | None,
    worst: Mapping[str, Severity],
) -> tuple[str, str]:
    """The state, and what to do about it."""
    if figures[0].value is None:
        return ("off" if spec.off else "unknown"), ""
    found, advice, judged = Severity.OK, "", False
    for rule_id, at in spec.judges.items():
        rule, value = rules.get(rule_id), figures[at].value
        if rule is None or value is None:
            continue
        judged = True
        severity = rule.level(value)
        if rule_id in BY_HIT_RATE and not _reused(figures[at]):
            severity = Severity.OK
        if severity > found:
            found, advice = severity, rule.advice
    for cause in spec.row.causes:
        severity = worst.get(cause, Severity.OK)
        if severity > found:
            found, advice = severity, f"see the incidents: {cause}"
    if spec.trend_only or (not judged and spec.judges and found == Severity.OK):
        return "trend", ""
    return found.word, advice


def _reused(figure: Trend) -> bool:
    """Whether the workload is known to repeat prefixes: the period before shows it."""
    return figure.before is not None and figure.before >= KNOWN_REUSE


def _band(spec: RowSpec, rules: Mapping[str, Rule]) -> tuple[float | None, float | None]:
    """The band's bounds; those of a target that is stated."""
    for rule_id in ("TTFT-P99", "ITL-P99"):
        if rule_id in spec.judges and rule_id in rules:
            return None, rules[rule_id].threshold(Severity.WARNING)
    return spec.low, spec.high
