"""Notes on a report from Prometheus: how figures are computed, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kneewatch.agent.report.prometheus.incidents import LOOKED_MOST, LOOKED_S
from kneewatch.agent.report.prometheus.inventory import Roll
from kneewatch.agent.report.prometheus.period import CURVES_MOST, Read
from kneewatch.agent.report.prometheus.queries import GPUS, Told
from kneewatch.agent.report.prometheus.resolution import Resolution
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.dashboards.prometheus.hourly_totals import STEP_S
from kneewatch.reports.formatting import duration, plural
from kneewatch.reports.weekly.figures import Method

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the series' label `tier`, else the GPU that DCGM "
        "names, else that of the settings. No figure is made of two tiers.",
        ("9.5",),
    ),
    Method(
        "counters",
        "Prometheus's increase() of each local hour, or sums of it that recording rules keep of "
        "five minutes each, added up by tier on the server. A counter that went back began anew "
        "at nothing.",
        (),
    ),
    Method(
        "gauges",
        "Means over steps, engine by engine; the busiest (or worst) hour is the highest mean of a "
        "local hour.",
        (),
    ),
    Method(
        "incidents",
        "The steps of each engine are searched for signs of trouble. Around each sign (the "
        f"{LOOKED_MOST} worst; of long ones the first {duration(LOOKED_S)}) the samples are read "
        "as they were scraped and judged as the sidecar judges pages; further outages, cascades "
        "and stalls are told from the steps alone. Restarts are process_start_time_seconds. "
        "Repeats within 15 minutes are one incident; what follows from a cause is told with it.",
        ("7.4", "8.5"),
    ),
    Method(
        "knee",
        "One point a step, of some engines of each tier: requests in flight, what was served, how "
        "late, over a window at the step's end; gathered by concurrency in steps of the square "
        "root of two. With targets C_max is the last step that keeps them in most of its windows, "
        "without them the step with most tokens per second over the time a token takes. Only "
        "loads that were seen count.",
        ("8.1", "8.3"),
    ),
    Method(
        "track record",
        "What became of a recommendation cannot be seen in a metrics system's series.",
        ("9.1",),
    ),
)


# --- What a reader must know of a report from a metrics system ------------------------------------


SAID_MOST = 4


class Looked(Protocol):
    """How many times with signs of trouble were looked into, told from the steps alone, left out,
    and could not be read."""

    looked: int
    coarse: int
    left_out: int
    unread: int


def notices_of(problems: Told, looked: Looked) -> tuple[str, ...]:
    """What must be said before anything is read."""
    notices: list[str] = []
    if problems.warnings:
        shown = "; ".join([*problems.warnings][:SAID_MOST])
        notices.append(f"the answers are partial, by the server's own word: {shown}")
    if problems.failed:
        shown = "; ".join(
            f"{name}: {error}" for name, error in [*problems.failed.items()][:SAID_MOST]
        )
        queries = plural(len(problems.failed), "query", "queries")
        notices.append(f"{queries} had no answer, and what they tell is unknown: {shown}")
    if looked.left_out:
        times = plural(looked.left_out, "more time")
        notices.append(
            f"not looked into: {times} with signs of trouble. The list of incidents is not "
            "complete; ask by tier or for fewer days"
        )
    return tuple(notices)


def notes_of(
    roll: Roll, grid_resolution: Resolution, now: Read, source: PrometheusSource, looked: Looked
) -> tuple[str, ...]:
    """How the data was read, and what a metrics system cannot tell."""
    recorded = (
        f"signals from recording rules: {', '.join(now.recorded)}; all others from raw series"
        if now.recorded
        else "no signals of kneewatch's recording rules were found: all are from raw series "
        "(kneewatch export prometheus-rules makes them)"
    )
    again = f", {source.retried} of them again" if source.retried else ""
    return (
        f"read from a metrics system that scrapes every {grid_resolution.scrape_s:g} s: counters and "
        f"histograms by the hour, gauges as means of {duration(grid_resolution.step_s)}, arrivals in steps "
        f"of {duration(grid_resolution.begun_s)}; highest values are those of these means",
        recorded,
        *_summed(now),
        f"{plural(looked.looked, 'time')} with signs of trouble (scrapes that fail, preemptions, "
        "queues, no tokens, late first tokens, recorded causes) read sample by sample and judged "
        "as the sidecar judges; a cause without such a sign is not found",
        f"the curve is of at most {CURVES_MOST} engines of a tier",
        *(
            [f"{plural(looked.coarse, 'more time')} told from the steps alone: without evidence, "
             "stages and advice"]
            if looked.coarse
            else []
        ),
        *(
            [f"{plural(looked.unread, 'time')} could not be read sample by sample: only what the "
             "steps tell is told of it"]
            if looked.unread
            else []
        ),
        "what became of recommendations is unknown: kneewatch run follows them",
        _gpus(roll, now),
        f"{plural(source.pace.asked, 'query', 'queries')}{again}",
        *_missing(roll, now),
    )  # fmt: skip


def _gpus(roll: Roll, now: Read) -> str:
    """Of how many engines DCGM tells."""
    with_gpus = {key for figure in GPUS for key in now.gauges.get(figure, {})}
    covered = sum(engine.key in with_gpus for engine in roll.members)
    if not covered:
        return "GPU figures: the server has no DCGM series of these engines' pods or nodes"
    return (
        f"GPU figures of {covered} of {plural(len(roll.members), 'engine')}, of DCGM: of the pod's "
        "GPUs where its series name it, else of all the node's"
    )


def _summed(now: Read) -> list[str]:
    """Where counters and histograms are from."""
    hours = len(now.grid.slots)
    if not now.summed:
        return [
            "counters and histograms: from raw series; the sums that recording rules keep "
            "(kneewatch-hourly) are there for no hour, or cannot tell these engines from others"
        ]
    rest = "" if now.summed == hours else "; the other hours from raw series"
    return [
        f"counters and histograms: {now.summed} of {plural(hours, 'hour')} from the sums that "
        f"recording rules keep (kneewatch-hourly), which may end {duration(STEP_S)} before the hour"
        f" does{rest}"
    ]


def _missing(roll: Roll, now: Read) -> list[str]:
    """Series that no engine of a tier has."""
    lines: list[str] = []
    for tier in roll.tiers():
        groups = {roll.group(engine) for engine in roll.of(tier)}
        had: Mapping[str, object] = {**now.counted([*groups]), **now.tallies([*groups])}
        lacking = [name for name in (*now.counts, *now.histograms) if name not in had]
        if lacking:
            lines.append(f"no series of {', '.join(lacking)} ({tier})")
    return lines
