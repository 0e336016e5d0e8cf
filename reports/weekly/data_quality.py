"""How far the report can be trusted, and how each figure is computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kneewatch.reports.weekly.figures import (
    ConfigDifference,
    DataQuality,
    EngineChange,
    Gap,
    Method,
    TargetQuality,
    UnknownSignal,
)
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Observed,
    TargetObserved,
    TierObserved,
)
from kneewatch.reports.weekly.trends import NOISE_TEST

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the target's label `tier`, or model and GPU as the "
        "settings state them. No figure is made of two tiers.",
        ("9.5",),
    ),
    Method("arrows", NOISE_TEST, ()),
    Method(
        "percentiles",
        "Increases of the server's histogram buckets, summed over the period and the tier's "
        "engines, then interpolated as Prometheus's histogram_quantile does. They are as fine as "
        "the buckets. No percentile is averaged.",
        ("8.2", "9.3"),
    ),
    Method(
        "counters",
        "As Prometheus counts: a counter that went back began anew at nothing. What was counted "
        "while nobody looked is in the sums, spread evenly over that time; of a process that was "
        "replaced then, only what the new one had counted.",
        (),
    ),
    Method(
        "gauges",
        "Time-weighted means over the scrapes; the busiest (or worst) hour is the highest mean of "
        "a local hour.",
        (),
    ),
    Method(
        "goodput and error budget",
        "A request is in time when its first token came within the TTFT target, judged at the "
        "nearest bucket bound that is not above it. The objective is 99 % of requests, as the "
        "target is one of P99; the burn is the share of late requests over the 1 % allowed.",
        ("8.4",),
    ),
    Method(
        "time shares",
        "Sums of the queue, prefill and decode histograms over that of whole requests; what is "
        "left is the server's other work and preempted time.",
        ("8.4",),
    ),
    Method(
        "incidents",
        "Stages and causes as the sidecar concluded them at each scrape, from warning on, and "
        "restarts. Repeats within 15 minutes are one incident; what follows from a cause is told "
        "with it.",
        ("7.4", "8.5"),
    ),
    Method(
        "cost of an incident",
        "Preemptions and late requests are counted from its start to its end; recomputed tokens "
        "are preemptions by the mean prompt, at least; lost requests are those that the hour "
        "before would have served in a time in which nothing was.",
        ("7.4",),
    ),
    Method(
        "knee",
        "One point a minute and engine: requests in flight, what was served, how late; gathered "
        "by concurrency in steps of the square root of two. With targets C_max is the last step "
        "that keeps them in most of its minutes, without them the step with most tokens per "
        "second over the time a token takes. Only loads that were seen count.",
        ("8.1", "8.3"),
    ),
    Method(
        "Little's law",
        "C_max over the mean time of a request there, against the requests that were served "
        "there: a gap above 2 means that the two do not belong together.",
        ("8.3",),
    ),
    Method(
        "benchmark",
        "TTFT P99 more than 30 % above the benchmark's, or GPU activity while serving more than "
        "20 points below it: the size was computed for another workload.",
        ("9.1",),
    ),
    Method(
        "arrivals",
        "Requests that got their first token, minute by minute, all engines of the tier together; "
        "P95 and P99 are of these minutes.",
        ("1.3",),
    ),
    Method(
        "archetype",
        "By the mean prompt (long from 2,000 tokens) and the mean output (long from 800).",
        ("1.2",),
    ),
    Method(
        "size",
        "From ceil(P99 of arrivals x safety / usable requests a second of one engine) to the "
        "guide's ceil(ceil(P99 / usable) x safety) a fleet is of the right size; what is usable is "
        "learned from the period, or predicted from model and GPU.",
        ("8.3", "9.1"),
    ),
    Method(
        "money",
        "Every hour of an engine is paid, idle or not: GPU-hours by price, over generated tokens. "
        "Idle is an hour's share with fewer than one request in two running, and none waiting.",
        ("9.1", "9.2"),
    ),
    Method(
        "track record",
        "A change counts as made where the engine's own page shows it; then what was predicted is "
        "compared with what was measured under a load like the one before.",
        ("9.1",),
    ),
)


# --- How far the report can be trusted: gaps, restarts, unknown signals, changes of version -------


GAPS_SHOWN = 12
VERSION_MARKS = ("_block_size_resolved", "vllm_version", "version")
"""Labels that only a change of version changes."""


def data_quality(observed: Observed) -> DataQuality:
    """What is known of the data itself."""
    return DataQuality(
        targets=tuple(
            _target(one, observed.grid.to_s - observed.grid.from_s) for one in observed.targets
        ),
        changes=tuple(_change(one) for one in observed.configured),
        unknown=_unknown(observed.tiers),
        notes=(*observed.notes, *_bucket_notes(observed.tiers)),
        methods=_methods(observed),
    )


def _methods(observed: Observed) -> tuple[Method, ...]:
    own = {method.figure: method for method in observed.methods}
    return tuple(own.get(method.figure, method) for method in METHODS)


def _target(one: TargetObserved, period_s: float) -> TargetQuality:
    longest = sorted(one.unread, key=lambda gap: gap.from_s - gap.to_s)[:GAPS_SHOWN]
    shown = sorted(longest, key=lambda gap: gap.from_s)
    return TargetQuality(
        target=one.target,
        scrapes=one.scrapes,
        failed=one.failed,
        interval_s=one.interval_s,
        watched_ratio=min(1.0, one.watched_s / period_s),
        gap_s=sum(gap.to_s - gap.from_s for gap in one.unread),
        gaps=tuple(Gap(gap.from_s, gap.to_s, gap.why or "nobody looked") for gap in shown),
        gaps_left_out=len(one.unread) - len(shown),
    )


def _change(one: Configured) -> EngineChange:
    differences = tuple(
        ConfigDifference(key, one.before.get(key, ""), one.after.get(key, ""))
        for key in dict.fromkeys((*one.before, *one.after))
        if one.before and one.before.get(key) != one.after.get(key)
    )
    return EngineChange(
        t_s=one.t_s,
        target=one.target,
        engine=one.engine,
        what=_what(one, differences),
        restart=one.restart,
        differences=differences,
    )


def _what(one: Configured, differences: Sequence[ConfigDifference]) -> str:
    if not one.before and not one.restart:
        return "first seen"
    if any((key in one.before) != (key in one.after) for key in (*one.before, *one.after)):
        return "restarted with other labels: another version of vLLM, it seems"
    if differences:
        return "restarted with another configuration" if one.restart else "another configuration"
    return "restarted, configuration unchanged"


def _unknown(tiers: Sequence[TierObserved]) -> tuple[UnknownSignal, ...]:
    """Signals that engines never had, each with its reason once."""
    engines: dict[tuple[str, str], list[str]] = {}
    for engine in _engines(tiers):
        for signal, why in engine.unknown.items():
            engines.setdefault((signal, why), []).append(f"{engine.target} engine {engine.engine}")
    return tuple(
        UnknownSignal(signal, why, tuple(sorted(names)))
        for (signal, why), names in sorted(engines.items())
    )


def _bucket_notes(tiers: Sequence[TierObserved]) -> list[str]:
    """Histograms whose buckets were not the same all the time, or on all engines of a tier."""
    notes: list[str] = []
    for tier in tiers:
        layouts: dict[str, set[tuple[float, ...]]] = {}
        for span in (
            *(span for engine in tier.engines for span in engine.spans),
            *tier.together.spans,
        ):
            for metric, tally in span.tallies.items():
                if tally.count > 0:
                    layouts.setdefault(metric, set()).add(tally.bounds)
        for metric, bounds in layouts.items():
            if len(bounds) > 1:
                common = set[float].intersection(*(set(one) for one in bounds))
                notes.append(
                    f"{tier.id}: {metric} had {len(bounds)} different sets of buckets; its "
                    f"percentiles rest on the {len(common)} bounds that all have"
                )
    return notes


def _engines(tiers: Sequence[TierObserved]) -> Iterable[EngineObserved]:
    return (engine for tier in tiers for engine in tier.engines)
