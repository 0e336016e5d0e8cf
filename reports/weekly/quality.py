"""How far the report can be trusted: gaps, restarts, unknown signals, changes of version. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kneewatch.reports.weekly.happened import Configured, TargetObserved
from kneewatch.reports.weekly.methods import METHODS
from kneewatch.reports.weekly.observed import EngineObserved, Observed, TierObserved
from kneewatch.reports.weekly.trust import (
    ConfigDifference,
    DataQuality,
    EngineChange,
    Gap,
    Method,
    TargetQuality,
    UnknownSignal,
)

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
