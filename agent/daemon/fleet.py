"""The targets under watch, each with its job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kneewatch.agent.daemon.basis import Basis
from kneewatch.agent.daemon.clockwork import Clockwork, phase_ratio
from kneewatch.agent.daemon.watch import Sinks, Watch
from kneewatch.agent.targets import TargetSpec

log = logging.getLogger(__name__)

FIRST_CYCLE_S = 0.02
"""First cycles are so far apart on average: a page is dearest when it is first seen."""


class Fleet:
    """Watches what it is told to, and goes on with what it watched already.

    `on_targets` is called with the targets whenever they may be others.
    """

    def __init__(
        self,
        clockwork: Clockwork,
        sinks: Sinks,
        *,
        on_targets: Callable[[Sequence[TargetSpec]], None] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clockwork, self._sinks, self._wall = clockwork, sinks, wall
        self._on_targets = on_targets
        self._watches: dict[str, Watch] = {}
        self._specs: tuple[TargetSpec, ...] = ()

    def specs(self) -> Sequence[TargetSpec]:
        """What is watched. Safe between threads."""
        return self._specs

    @property
    def all_seen(self) -> bool:
        """Whether every target has had a cycle."""
        return all(watch.cycles for watch in self._watches.values())

    def apply(self, specs: Sequence[TargetSpec], found: Mapping[str, Basis]) -> None:
        """Watch these targets and no others. What was seen of a target is kept where it is still
        the same address, judged by the same.

        Raises:
            CaptureError: a capture cannot be played; nothing has changed then.
        """
        watches: dict[str, Watch] = {}
        for spec in specs:
            old, basis = self._watches.get(spec.name), found[spec.name]
            same = old is not None and old.spec.address == spec.address and old.basis == basis
            watches[spec.name] = (
                old
                if old is not None and same
                else Watch(spec, basis, self._sinks, wall=self._wall)
            )
        before, self._watches, self._specs = self._watches, watches, tuple(specs)
        for name, watch in before.items():
            if watches.get(name) is not watch:
                self._end(name, watch)
        if self._on_targets:
            self._on_targets(self._specs)
        for spec in specs:
            self._go_on(spec, before.get(spec.name))
        log.info("targets are watched targets=%s kept=%s", len(specs), self._kept(before))

    def _go_on(self, spec: TargetSpec, before: Watch | None) -> None:
        watch, interval_s = self._watches[spec.name], float(spec.settings["interval_s"])
        if watch is not before:
            spread_s = FIRST_CYCLE_S * len(self._watches)
            soon = spread_s <= interval_s / 2
            first_in_s = phase_ratio(spec.name) * spread_s if soon else None
            self._clockwork.put(spec.name, watch, interval_s=interval_s, first_in_s=first_in_s)
            return
        other_interval = watch.spec.settings["interval_s"] != interval_s
        watch.adopt(spec)
        if other_interval:
            self._clockwork.put(spec.name, watch, interval_s=interval_s)

    def _end(self, name: str, watch: Watch) -> None:
        self._clockwork.drop(name)
        watch.retire()
        if name not in self._watches:
            self._sinks.board.drop(name)

    def _kept(self, before: Mapping[str, Watch]) -> int:
        return sum(before.get(name) is watch for name, watch in self._watches.items())
