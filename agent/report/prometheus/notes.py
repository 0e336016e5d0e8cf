"""Notes on a report from Prometheus: how figures are computed, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kneewatch.agent.report.prometheus.incidents import REPLAYED_MOST, REPLAYED_S
from kneewatch.agent.report.prometheus.inventory import FleetEngines
from kneewatch.agent.report.prometheus.period import CURVES_MOST, PeriodData
from kneewatch.agent.report.prometheus.queries import GPUS, QueryProblems, Resolution
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.dashboards.prometheus.hourly_totals import STEP_S
from kneewatch.reports.formatting import duration, plural
from kneewatch.reports.weekly.figures import Method

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the series' label `tier`, else the GPU that DCGM "
        "names, else that of the settings. No figure combines two tiers.",
        ("9.5",),
    ),
    Method(
        "counters",
        "Prometheus's increase() over each local hour, or the 5-minute sums of it that recording "
        "rules keep, summed by tier on the server. A counter that decreases restarted from 0.",
        (),
    ),
    Method(
        "gauges",
        "Means over steps, per engine; the busiest (or worst) hour is the local hour with the "
        "highest mean.",
        (),
    ),
    Method(
        "incidents",
        "The steps of each engine are searched for signs of trouble. Around each sign (the "
        f"{REPLAYED_MOST} with most harm; of long ones the first {duration(REPLAYED_S)}) the raw "
        "samples are read and diagnosed as the sidecar diagnoses its scrapes; further outages, "
        "cascades "
        "and stalls are reported from the steps alone. A pool without replicas is judged as "
        "`diagnose --prometheus --at` judges it then. Restarts are process_start_time_seconds. "
        "Repeats within 15 minutes count as one incident; downstream effects are reported under "
        "their root cause.",
        ("7.4", "8.5"),
    ),
    Method(
        "knee",
        "One point per step, for some engines of each tier: requests in flight, throughput and "
        "latency over a window at the step's end; grouped by concurrency in steps of the square "
        "root of two. With targets C_max is the last step that keeps them in most of its windows, "
        "without them the step with most tokens per second over the time a token takes. Only "
        "loads that were seen count.",
        ("8.1", "8.3"),
    ),
    Method(
        "track record",
        "A metrics system's series do not show whether a recommendation was applied.",
        ("9.1",),
    ),
)


# --- Notices and notes of a report from Prometheus ------------------------------------------------


SAID_MOST = 4


class SearchCounts(Protocol):
    """How many suspect spans were replayed from samples, reported from the steps alone, and could
    not be read."""

    replayed: int
    coarse: int
    unread: int


def notices_of(problems: QueryProblems, left_out: int) -> tuple[str, ...]:
    """Warnings for the top of the report: partial answers, failed queries, and how many times with
    signs of trouble were left out."""
    notices: list[str] = []
    if problems.warnings:
        shown = "; ".join([*problems.warnings][:SAID_MOST])
        notices.append(f"the server reports partial answers: {shown}")
    if problems.failed:
        shown = "; ".join(
            f"{name}: {error}" for name, error in [*problems.failed.items()][:SAID_MOST]
        )
        queries = plural(len(problems.failed), "query", "queries")
        notices.append(f"{queries} failed, and their figures are unknown: {shown}")
    if left_out:
        times = plural(left_out, "more time")
        notices.append(
            f"not analysed: {times} with signs of trouble. The list of incidents is incomplete; "
            "use --tier or a shorter --since"
        )
    return tuple(notices)


def notes_of(
    fleet: FleetEngines,
    resolved: Resolution,
    now: PeriodData,
    source: PrometheusSource,
    search: SearchCounts,
) -> tuple[str, ...]:
    """How the data was read, and what the metrics system does not contain."""
    recorded = (
        f"signals from recording rules: {', '.join(now.recorded)}; all others from raw series"
        if now.recorded
        else "no signals from kneewatch's recording rules were found: all are from raw series "
        "(`kneewatch export prometheus-rules` prints the rules)"
    )
    again = f", {source.retried} of them retried" if source.retried else ""
    return (
        f"read from a metrics system that scrapes every {resolved.scrape_s:g} s: counters and "
        f"histograms by the hour, gauges as means of {duration(resolved.step_s)}, arrivals in "
        f"steps of {duration(resolved.begun_s)}; highest values are the highest of these means",
        recorded,
        *_summed(now),
        f"{plural(search.replayed, 'time')} with signs of trouble (scrapes that fail, preemptions, "
        "queues, no tokens, late first tokens, recorded causes) read sample by sample and "
        "diagnosed as the sidecar does; a cause without such a sign is not found",
        f"the latency curve uses at most {CURVES_MOST} engines per tier",
        *(
            [f"{plural(search.coarse, 'more time')} reported from the steps alone: without "
             "evidence, stages and advice"]
            if search.coarse
            else []
        ),
        *(
            [f"{plural(search.unread, 'time')} could not be read sample by sample: reported "
             "from the steps alone"]
            if search.unread
            else []
        ),
        "whether recommendations were applied is unknown: only kneewatch run tracks them",
        _gpus(fleet, now),
        f"{plural(source.pace.asked, 'query', 'queries')}{again}",
        *_missing(fleet, now),
    )  # fmt: skip


def _gpus(fleet: FleetEngines, now: PeriodData) -> str:
    """How many engines have GPU figures from DCGM."""
    with_gpus = {key for figure in GPUS for key in now.gauges.get(figure, {})}
    covered = sum(engine.key in with_gpus for engine in fleet.members)
    if not covered:
        return "GPU figures: the server has no DCGM series of these engines' pods or nodes"
    return (
        f"GPU figures of {covered} of {plural(len(fleet.members), 'engine')}, from DCGM: the pod's "
        "GPUs where the series name the pod, else all GPUs of the node"
    )


def _summed(now: PeriodData) -> list[str]:
    """Whether counters and histograms come from recording rules or from raw series."""
    hours = len(now.grid.slots)
    if not now.summed:
        return [
            "counters and histograms: from raw series; the sums that recording rules keep "
            "(kneewatch-hourly) are missing for all hours, or do not separate these engines from "
            "others"
        ]
    rest = "" if now.summed == hours else "; the other hours from raw series"
    return [
        f"counters and histograms: {now.summed} of {plural(hours, 'hour')} from the sums that "
        f"recording rules keep (kneewatch-hourly), which may end {duration(STEP_S)} before the hour"
        f" does{rest}"
    ]


def _missing(fleet: FleetEngines, now: PeriodData) -> list[str]:
    """Series that no engine of a tier has."""
    lines: list[str] = []
    for tier in fleet.tiers():
        groups = {fleet.group(engine) for engine in fleet.of(tier)}
        had: Mapping[str, object] = {**now.counted([*groups]), **now.tallies([*groups])}
        lacking = [name for name in (*now.counts, *now.histograms) if name not in had]
        if lacking:
            lines.append(f"no series of {', '.join(lacking)} ({tier})")
    return lines
