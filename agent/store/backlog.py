"""Packed cycles that wait to be written, no more than so many bytes of them."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from kneewatch.agent.store.cycle import Cycle
from kneewatch.agent.store.packing import EngineName, PackedCycle, Packer

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 1024 * 1024


class Backlog:
    """Cycles in the order in which they came. `dropped` counts those that nobody will write."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._packer = Packer()
        self._waiting: deque[PackedCycle] = deque()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, cycle: Cycle) -> None:
        """Add a cycle; the oldest goes where there is no room."""
        try:
            packed = self._packer.pack(cycle)
        except Exception:
            # Whatever is wrong with one cycle, the others are kept.
            log.exception("cycle cannot be packed target=%s", cycle.target)
            self.dropped += 1
            return
        self._waiting.append(packed)
        self._bytes += packed.bytes
        while self._bytes > self._most_bytes:
            self.drop(self.next(1)[0])

    @property
    def since_s(self) -> float | None:
        """The time of the first cycle that waits; None where none does."""
        return self._waiting[0].t_s if self._waiting else None

    def waiting(self) -> list[PackedCycle]:
        """All that wait, from any thread: a deque is copied in one step."""
        return list(self._waiting)

    def next(self, most: int) -> list[PackedCycle]:
        """The cycles to be written next."""
        return list(itertools.islice(self._waiting, most))

    def written(self, cycles: int) -> None:
        """The first so many are written."""
        for _ in range(cycles):
            self._bytes -= self._waiting.popleft().bytes

    def drop(self, cycle: PackedCycle) -> None:
        """Give the first cycle up. What its documents said, the next ones say."""
        self.written(1)
        self.dropped += 1
        for engine in cycle.engines:
            if engine.document is not None:
                self._pass_on(engine.name, engine.document)

    def _pass_on(self, name: EngineName, document: bytes) -> None:
        for at, cycle in enumerate(self._waiting):
            for engine in cycle.engines:
                if engine.name != name:
                    continue
                if engine.document is None:
                    engines = tuple(
                        replace(one, document=document) if one is engine else one
                        for one in cycle.engines
                    )
                    self._waiting[at] = replace(cycle, engines=engines)
                return
        self._packer.forget(name)

    def unwritten(self, names: Iterable[EngineName]) -> None:
        """These engines of cycles that are written were left out: their next documents are told."""
        for name in names:
            self._packer.forget(name)

    def begin_anew(self) -> None:
        """A new file has been begun: it has no document yet."""
        self._packer.forget()
