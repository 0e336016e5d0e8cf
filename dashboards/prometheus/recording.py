"""Recording rules: every signal that PromQL can express, and what is derived from several. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Dialect, InfoChanges
from kneewatch.dashboards.prometheus.model import Group, Plan, Record, duration, number, recorded
from kneewatch.dashboards.prometheus.seasons import COMPARED, held_against
from kneewatch.diagnose.case import CONCLUDED_FROM
from kneewatch.diagnose.derived import RECENT_REQUESTS_MIN, RECENT_SCRAPES, RECENT_SHARE
from kneewatch.rules.baseline import DRIFTS, SAMPLES_MAX, SAMPLES_MIN

CONFIDENCE = "cause_confidence"
QUIET_WAITING = 1.0
"""A queue this long is not quiet (diagnose/engine.py)."""

AGAIN = ("prefix_hit_tokens_mean", "output_tokens_mean", "running_avg")
"""Signals whose baseline causes ask for, several times each."""


def inexpressible(plan: Plan) -> list[str]:
    """Signals that PromQL cannot express: numbers that stand inside a label."""
    return [s.key for s in plan.signals() if s.expr.promql(plan.dialect) is None]


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
    found["prefix_hit_quiet_ratio"] = held_against(plan, "prefix_hit_ratio")
    for key in AGAIN:
        found[f"{key}:baseline"] = held_against(plan, key)
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
    """What the quiet medians are taken of: values of scrapes in which nothing was wrong.

    Evaluated after the alerts, for a finding at warning is not quiet.
    """
    # What may stand for weeks is no less quiet for it: a GPU's errors, and a slower machine.
    concluded = f'{recorded(CONFIDENCE)}{{cause!~"gpu_fault.*|bad_node"}}'
    disturbed = (
        f"({recorded('waiting_avg')} >= {number(QUIET_WAITING)})"
        f" or ({recorded('cascade_stage')} >= 2)"
        f' or (max by ({plan.engine}) (ALERTS{{kneewatch="finding", alertstate="firing",'
        ' severity=~"warning|critical"}))'
        f" or (max by ({plan.engine}) ({concluded} >= {number(CONCLUDED_FROM)}))"
    )
    calm = (
        f"({recorded('arrival_per_s')} > 0) unless"
        f" max_over_time({recorded('disturbed')}[{duration(plan.window_s)}])"
    )
    half = duration(plan.window_s / 2)
    # A target that has just appeared has no quiet yet.
    seen = f"{recorded('running')} offset {half}"
    rules = [
        Record(recorded("disturbed"), disturbed),
        Record(recorded("calm"), f"({calm}) and ({seen})"),
    ]
    taken = recorded("calm")
    if plan.ordered:  # one sample each half window, as the sidecar takes them
        taken = recorded("sampled")
        spaced = duration((plan.window_s - plan.interval_s) / 2)
        rules.append(Record(taken, f"{recorded('calm')} unless last_over_time({taken}[{spaced}])"))
    rules += [Record(recorded(f"{key}:calm"), f"{recorded(key)} and {taken}") for key in COMPARED]
    return Group("kneewatch-calm", tuple(rules))


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
