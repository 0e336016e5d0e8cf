"""A burst of prompts played step by step: first come first served, prompts before decodes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from kneewatch.diagnose.sizing.speed.performance import StepModel


@dataclass(slots=True, kw_only=True)
class Burst:
    """All prompts at once. `waiting` has their output lengths, the last one served first.

    `firsts_s` becomes the times of first tokens, `gaps_s` the mean time between tokens of a
    request, `clock_s` the end of the last one.
    """

    step: StepModel
    prompt_tokens: float
    budget: int
    places: float
    waiting: list[float]
    clock_s: float = 0.0
    firsts_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    _turn: int = 0
    _left: float = 0.0
    _running: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )

    def play(self) -> None:
        """Run until every request has ended."""
        while self.waiting or self._running:
            taken, entered = self._admit()
            # Without prompts nothing changes until the next request ends.
            turns = 1 if taken else max(1, math.ceil(self._running[0][0]) - self._turn)
            self.clock_s += turns * self.step.total_s(len(self._running), taken)
            self._turn += turns
            self._end()
            for length in entered:
                self.firsts_s.append(self.clock_s)
                if length > 1:
                    heapq.heappush(self._running, (self._turn + length - 1, length, self.clock_s))

    def _admit(self) -> tuple[float, list[float]]:
        """Prompt tokens of this step, and the output lengths of the prompts that it completes."""
        room = float(self.budget - len(self._running))
        taken, entered = 0.0, list[float]()
        while self.waiting and room > 0 and len(self._running) + len(entered) + 1 <= self.places:
            self._left = self._left or self.prompt_tokens
            part = min(self._left, room)
            taken, room, self._left = taken + part, room - part, self._left - part
            if self._left:
                break
            entered.append(self.waiting.pop())
        return taken, entered

    def _end(self) -> None:
        while self._running and self._running[0][0] <= self._turn:
            _, length, first_s = heapq.heappop(self._running)
            self.gaps_s.append((self.clock_s - first_s) / (length - 1))
