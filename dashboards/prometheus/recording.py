"""Recording rules: every signal that PromQL can express, and what is derived from several. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Dialect, InfoChanges
from kneewatch.dashboards.prometheus.model import Group, Plan, Record
from kneewatch.dashboards.prometheus.seasons import COMPARED, USUALLY, held_against
from kneewatch.diagnose.case import CONCLUDED_FROM
from kneewatch.diagnose.causes import CAUSES
from kneewatch.diagnose.derived import RECENT_REQUESTS_MIN, RECENT_SCRAPES, RECENT_SHARE
from kneewatch.rules.baseline import (
    DRIFTS,
    FAMILIES,
    QUEUE_MOVES,
    QUIET_WAITING,
    SAMPLES_MAX,
    SAMPLES_MIN,
    STAGE_MOVES,
    TRACKED,
)
from kneewatch.rules.cascade import EVICTS
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.quantities import Usually

CONFIDENCE = "cause_confidence"
FAMILY_SERIES = ("disturbed", "sampled")

CASCADE = ("cascade_stage", "cascade_severity", "work_fallen")
FOUND = ("gpu_memory_used_ratio", "gpu_engine_active_ratio")
"""Signals of an engine's GPUs that findings judge, where labels join them."""


def inexpressible(plan: Plan) -> list[str]:
    """Signals that PromQL cannot express: numbers that stand inside a label."""
    return [s.key for s in plan.signals() if s.expr.promql(plan.dialect) is None]


class Recorded:
    """How conditions are spelled with what a plan's rules record (rules/conditions)."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.window_s, self.interval_s = plan, plan.window_s, plan.interval_s
        self.scale, self.targets, self.process = plan.scale, plan.targets, plan.process
        signals = {signal.key for signal in plan.signals()} - set(inexpressible(plan))
        of_gpus = FOUND if plan.gpu_join else ()
        self.keys = frozenset({*signals, *derived(plan), *CASCADE, *of_gpus})
        """What is recorded for each engine."""

    def series(self, key: str) -> str | None:
        """The recorded series of a signal; None where there is none."""
        return recorded(key) if key in self.keys else None

    def raw(self, metric: str, suffix: str = "", extra: str = "") -> str:
        """vLLM's own series of a metric."""
        return self.plan.dialect.series(metric, suffix, extra=extra)

    def summed(self, expr: str) -> str:
        """An expression over vLLM's own series, summed by engine."""
        return self.plan.dialect.sum(expr)

    def last_rate(self, metric: str) -> str:
        """The rate of a counter between its last two scrapes, by engine."""
        return self.summed(f"irate({self.raw(metric, '_total')}[{self.plan.dialect.range}])")


def signal_group(plan: Plan) -> Group:
    """A series for each signal, per engine."""
    dialect = plan.dialect
    rules = [
        Record(recorded(signal.key), _spread(plan, signal, query))
        for signal in plan.signals()
        if (query := signal.expr.promql(dialect)) is not None
    ]
    return Group("kneewatch-signals", tuple(rules))


def _spread(plan: Plan, signal: Signal, query: str) -> str:
    """What a page says once for all its engines (the running adapters), told for each."""
    if not isinstance(signal.expr, InfoChanges):
        return query
    each = f"({recorded('running')} * 0 + 1)"
    return f"{each} * on ({plan.process}) group_left () ({query})"


def derived_group(plan: Plan) -> Group:
    """Derived signals: counts in the window, quiet medians, and drifts against them."""
    return Group(
        "kneewatch-derived",
        tuple(Record(recorded(key), expr) for key, expr in derived(plan).items()),
    )


def derived(plan: Plan) -> Mapping[str, str]:
    """The derived signals' expressions by key, in an order in which each finds what it needs."""
    window = number(plan.window_s)
    found = {
        "preempted_in_window": f"{window} * {recorded('preemption_per_s')}",
        "errors_in_window": f"{window} * {recorded('finished_error_per_s')}",
        "prompt_tail_ratio": over("prompt_tokens_p99", "prompt_tokens_p95"),
        "prefill_busy_ratio": f"{recorded('arrival_per_s')} * {recorded('prefill_mean_s')}",
    }
    found |= _recent(plan)
    for key in COMPARED:
        found[f"{key}:quiet"] = _quiet(plan, key)
    for key, of in (*DRIFTS, ("kv_transfer_drift_ratio", "kv_transfer_mean_s")):
        found[key] = f"{recorded(of)} / ({held_against(plan, of)} > 0)"
    ended = "finished_length_ratio"
    found["finished_length_drift_points"] = f"{recorded(ended)} - ({held_against(plan, ended)})"
    for key in USUALLY:
        found[Usually(key).name] = held_against(plan, key)
    if plan.targets.ttft_p99_s is not None:
        wait = over("waiting", "completed_per_s")
        found["queue_wait_estimate_ratio"] = f"{wait} / {number(plan.targets.ttft_p99_s)}"
    return found


def _recent(plan: Plan) -> dict[str, str]:
    """What shows first on the window's newest quarter (diagnose/derived.py, `recent`)."""
    quarter_s = max(RECENT_SHARE * plan.window_s, RECENT_SCRAPES * plan.interval_s)
    quarter = _within(plan, quarter_s)
    half = _within(plan, max(quarter_s, 2 * RECENT_SHARE * plan.window_s))
    found: dict[str, str] = {}
    for kind in ("ratio", "tokens_mean"):
        hits = _signal(plan, f"prefix_hit_{kind}")
        told = [
            f"(({hits.expr.promql(dialect)}) and"
            f" {number(dialect.range_s)} * ({arrivals}) >= {number(RECENT_REQUESTS_MIN)})"
            for dialect in (quarter, half)
            if (arrivals := _signal(plan, "arrival_per_s").expr.promql(dialect))
        ]
        found[f"prefix_hit_recent_{kind}"] = " or ".join(told)
        recent, window = recorded(f"prefix_hit_recent_{kind}"), recorded(hits.key)
        found[f"prefix_hit_fewest_{kind}"] = f"({recent} <= {window}) or {window} or {recent}"
    spec = _signal(plan, "spec_acceptance_ratio")
    found["spec_acceptance_recent_ratio"] = spec.expr.promql(quarter) or ""
    swaps = _signal(plan, "lora_change_per_s")
    found["lora_change_recent_per_s"] = _spread(plan, swaps, swaps.expr.promql(quarter) or "")
    return found


def _within(plan: Plan, range_s: float) -> Dialect:
    return replace(plan.dialect, range_s=min(range_s, plan.window_s))


def _signal(plan: Plan, key: str) -> Signal:
    return next(signal for signal in plan.signals() if signal.key == key)


def calm_group(plan: Plan) -> Group:
    """What the quiet medians are taken of: values of scrapes in which nothing moved their family.

    Evaluated after the alerts, for a finding at warning is not quiet.
    """
    # Once for all families: there are many alerts to look through.
    firing = 'ALERTS{kneewatch="finding", alertstate="firing", severity=~"warning|critical"}'
    seen, warned, arrivals = map(recorded, ("seen", "warned", "arrival_per_s"))
    half, window = duration(plan.window_s / 2), duration(plan.window_s)
    rules = [
        Record(warned, f"max by ({plan.engine}, rule) ({firing})"),
        # A target that has just appeared has no quiet yet.
        Record(seen, f"({arrivals} > 0) and ({recorded('running')} offset {half})"),
    ]
    for family in FAMILIES:
        label = {"family": family}
        disturbed, sampled = (f'{recorded(key)}{{family="{family}"}}' for key in FAMILY_SERIES)
        on = f"unless on ({plan.engine})"
        calm = f"{seen} {on} max_over_time({disturbed}[{window}])"
        if plan.ordered:  # one sample each half window, as the sidecar takes them
            spaced = duration((plan.window_s - plan.interval_s) / 2)
            calm = f"({calm}) {on} last_over_time({sampled}[{spaced}])"
        rules.append(Record(recorded("disturbed"), _disturbed(plan, family), label))
        rules.append(Record(recorded("sampled"), calm, label))
        rules += [
            Record(recorded(f"{key}:calm"), f"{recorded(key)} and on ({plan.engine}) {sampled}")
            for key in TRACKED[family]
            if key in COMPARED
        ]
    return Group("kneewatch-calm", tuple(rules))


def _disturbed(plan: Plan, family: str) -> str:
    """Where something moves a family of signals: a cause, a finding at warning, the cascade or a
    queue."""
    causes = "|".join(record.id for record in CAUSES if family in record.moves)
    rules = "|".join(rule.id for rule in plan.rules() if family in rule.moves)
    concluded = f'{recorded(CONFIDENCE)}{{cause=~"({causes})(:.*)?"}} >= {number(CONCLUDED_FROM)}'
    warned = f'{recorded("warned")}{{rule=~"{rules}"}}'
    parts = [f"(max by ({plan.engine}) ({concluded}))"]
    parts += [f"(max by ({plan.engine}) ({warned}))"] if rules else []
    if family in STAGE_MOVES:
        parts.append(f"({recorded('cascade_stage')} >= {EVICTS})")
    if family in QUEUE_MOVES:
        parts.append(f"({recorded('waiting_avg')} >= {number(QUIET_WAITING)})")
    return " or ".join(parts)


def _quiet(plan: Plan, key: str) -> str:
    """The median of the quiet values; the last one known while there is no quiet."""
    remembered_s = SAMPLES_MAX * plan.window_s / 2
    calm = f"{recorded(f'{key}:calm')}[{duration(remembered_s)}]"
    dense = plan.window_s / 2 / plan.interval_s
    enough = SAMPLES_MIN if plan.ordered else max(1, round(SAMPLES_MIN * dense))
    return (
        f"(quantile_over_time(0.5, {calm}) and count_over_time({calm}) >= {enough})"
        f" or {recorded(f'{key}:quiet')}"
    )


def over(key: str, by: str) -> str:
    """One recorded series over another, where that is above nothing."""
    return f"{recorded(key)} / ({recorded(by)} > 0)"
