"""The limit on engines kept for one target, against labels of unbounded cardinality. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.names.vllm_series import EngineKey

ENGINES_MAX = 512
"""Most engines kept for one target, vanished ones included: labels that change with every scrape
must not use up the memory."""


class Tracked(Protocol):
    """An engine that is kept."""

    @property
    def last_s(self) -> float:
        """Time of the newest page that had it."""
        ...


class EngineLimit:
    """Applies ENGINES_MAX to one target, and remembers whether it was exceeded."""

    def __init__(self) -> None:
        self._exceeded, self._reported = False, False

    def admitted(
        self, engines: Sequence[EngineBinding], kept: Collection[EngineKey]
    ) -> Sequence[EngineBinding]:
        """The page's engines to diagnose, at most ENGINES_MAX; those already kept come first."""
        if len(engines) <= ENGINES_MAX:
            return engines
        self._exceeded = True
        return sorted(engines, key=lambda engine: engine.key not in kept)[:ENGINES_MAX]

    def evicted(
        self, admitted: Sequence[EngineBinding], kept: Mapping[EngineKey, Tracked]
    ) -> list[EngineKey]:
        """Kept engines to forget so that the admitted ones fit: those that left the page longest
        ago."""
        present = {engine.key for engine in admitted}
        over = len(present | kept.keys()) - ENGINES_MAX
        if over <= 0:
            return []
        self._exceeded = True
        gone = [key for key in kept if key not in present]
        return sorted(gone, key=lambda key: kept[key].last_s)[:over]

    def warning(self) -> str | None:
        """A line about the exceeded limit, once per target; else None."""
        if self._reported or not self._exceeded:
            return None
        self._reported = True
        return (
            f"engines: this page has more than {ENGINES_MAX} by the labels model_name and engine; "
            "the others are ignored"
        )
