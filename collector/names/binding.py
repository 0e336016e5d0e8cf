"""What a page's layout was found to hold: where each metric's values stand. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.collector.names.histogram import HistogramSlots
from kneewatch.collector.names.page import EngineKey, Labels
from kneewatch.collector.names.versions import VersionRange


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value stands in `Page.values`, and the metric's own labels, such as a reason."""

    position: int
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """Where the values of one engine stand, by canonical name.

    `infos` are metrics whose labels are the message. `created` are positions of times of creation,
    which change at a restart. `shared` are metrics that other engines of the page have as well.
    """

    key: EngineKey
    gauges: Mapping[str, tuple[Slot, ...]]
    counters: Mapping[str, tuple[Slot, ...]]
    histograms: Mapping[str, tuple[HistogramSlots, ...]]
    infos: Mapping[str, tuple[Slot, ...]]
    created: tuple[int, ...]
    shared: frozenset[str]

    def info(self, name: str, values: Sequence[float]) -> Mapping[str, str]:
        """The labels of an info metric; of several, those with the greatest value, the newest."""
        slots = [s for s in self.infos.get(name, ()) if not math.isnan(values[s.position])]
        newest = max(slots, key=lambda slot: values[slot.position], default=Slot(-1))
        return dict(newest.labels)


@dataclass(frozen=True, slots=True)
class Missing:
    """A metric that one would expect and that is not there, or not usable.

    `why` reads: removed in X, new in X, needs FLAG, only on the V1 engine, not counted yet,
    on the page for other engines only, on the page for an engine it does not name, damaged: ...,
    or renamed? where nothing explains it.
    `engine` is set where only that engine lacks it.
    """

    name: str
    why: str
    core: bool
    engine: EngineKey | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """What a page's layout holds; `version_range` are the vLLM versions that its names fit."""

    prefix: str
    engines: tuple[EngineBinding, ...]
    server: Mapping[str, tuple[Slot, ...]]
    process_start: int | None
    missing: tuple[Missing, ...]
    unknown_names: tuple[str, ...]
    version_range: VersionRange

    def why_missing(self, name: str, engine: EngineKey | None = None) -> str | None:
        """Why a metric is missing, for an engine or altogether; none where it is not."""
        for missing in self.missing:
            if missing.name == name and missing.engine in (None, engine):
                return missing.why
        return None
