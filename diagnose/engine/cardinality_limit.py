"""Which engines of a target are kept where its labels show more than there is room for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.names.vllm_series import EngineKey

ENGINES_MAX = 512
"""Engines kept of one target, vanished ones included: labels that change with every scrape must not
take all memory."""


class Seen(Protocol):
    """An engine that is kept."""

    @property
    def last_s(self) -> float:
        """Time of the newest page that had it."""
        ...


class Room:
    """The room for one target's engines, and whether there has been too little of it."""

    def __init__(self) -> None:
        self._short, self._told = False, False

    def judged(
        self, engines: Sequence[EngineBinding], kept: Collection[EngineKey]
    ) -> Sequence[EngineBinding]:
        """The page's engines that are judged; of too many the known ones first."""
        if len(engines) <= ENGINES_MAX:
            return engines
        self._short = True
        return sorted(engines, key=lambda engine: engine.key not in kept)[:ENGINES_MAX]

    def leaving(
        self, judged: Sequence[EngineBinding], kept: Mapping[EngineKey, Seen]
    ) -> list[EngineKey]:
        """Engines to forget, so that there is room for those that are judged: those that left the
        page longest ago."""
        present = {engine.key for engine in judged}
        over = len(present | kept.keys()) - ENGINES_MAX
        if over <= 0:
            return []
        self._short = True
        left = [key for key in kept if key not in present]
        return sorted(left, key=lambda key: kept[key].last_s)[:over]

    def told_once(self) -> str | None:
        """The line that says, once, that there were more engines than are kept."""
        if self._told or not self._short:
            return None
        self._told = True
        return (
            f"engines: more than {ENGINES_MAX} in the labels model_name and engine of this "
            "page; no more are kept"
        )
