"""A benchmark played step by step: first come first served, prompts before decodes. Pure."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct, field

from kneewatch.diagnose.sizing.speed.performance import ClosedLoop, StepModel

_MOST_REQUESTS = 4096
_Times = tuple[float, float, float]


class Burst(Struct, kw_only=True):
    """Prompts from an idle server on, `in_flight` at once at most; without it all at once.

    `places` is how many requests run at once, `request_s` what the API server takes for a request
    before the engine sees it, for each in turn. A draft makes a plain step `factor` times as long.
    `firsts_s` becomes the times from sending to first
    token, `gaps_s` the mean time between tokens of a request, `clock_s` the end of the last one.
    """

    step: StepModel
    prompt_tokens: float
    budget: int
    places: float
    lengths: Sequence[float]
    in_flight: float = math.inf
    request_s: float = 0.0
    factor: float = 1.0
    clock_s: float = 0.0
    firsts_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    _turn: int = 0
    _left: float = 0.0
    _parsed_s: float = 0.0
    _sent: int = 0
    _arriving: deque[_Times] = field(default_factory=deque[_Times])
    _running: list[_Times] = field(default_factory=list[_Times])

    def play(self) -> None:
        """Run until every request has ended."""
        for _ in range(int(min(self.in_flight, len(self.lengths)))):
            self._send()
        while self._arriving or self._running:
            taken, entered = self._admit()
            if not taken and not self._running:
                self.clock_s = self._arriving[0][0]
                continue
            # Without prompts nothing changes until the next request ends or arrives.
            turns = 1
            if not taken:
                turns = max(1, math.ceil(self._running[0][0]) - self._turn)
                if self._arriving and len(self._running) + 1 <= self.places:
                    until_s = self._arriving[0][0] - self.clock_s
                    step_s = self.factor * self.step.total_s(len(self._running))
                    turns = min(turns, max(1, math.ceil(until_s / step_s)))
            step_s = self.step.total_s(len(self._running), taken)
            self.clock_s += turns * step_s * (1.0 if taken else self.factor)
            self._turn += turns
            for length, sent_s in entered:
                self.firsts_s.append(self.clock_s - sent_s)
                if length > 1:
                    heapq.heappush(self._running, (self._turn + length - 1, length, self.clock_s))
                else:
                    self._send()
            self._end()

    def _send(self) -> None:
        """Let the client send its next prompt, which the API server parses after earlier ones."""
        if self._sent < len(self.lengths):
            self._parsed_s = max(self._parsed_s, self.clock_s) + self.request_s
            self._arriving.append((self._parsed_s, self.lengths[self._sent], self.clock_s))
            self._sent += 1

    def _admit(self) -> tuple[float, list[tuple[float, float]]]:
        """Prompt tokens of this step; length and time of sending of the prompts it completes."""
        room = float(self.budget - len(self._running))
        taken, entered = 0.0, list[tuple[float, float]]()
        while (
            self._arriving
            and self._arriving[0][0] <= self.clock_s
            and room > 0
            and len(self._running) + len(entered) + 1 <= self.places
        ):
            self._left = self._left or self.prompt_tokens
            part = min(self._left, room)
            taken, room, self._left = taken + part, room - part, self._left - part
            if self._left:
                break
            entered.append(self._arriving.popleft()[1:])
        return taken, entered

    def _end(self) -> None:
        while self._running and self._running[0][0] <= self._turn:
            _, length, first_s = heapq.heappop(self._running)
            self.gaps_s.append((self.clock_s - first_s) / (length - 1))
            self._send()


class Wave(Struct, frozen=True):
    """What a benchmark measures that starts all its requests at once, each followed by the next of
    the same length, as `vllm bench serve --max-concurrency` does."""

    ttft_s: float
    itl_s: float
    output_tokens_per_s: float


def wave(loop: ClosedLoop, concurrency: float, rounds: int = 1) -> Wave | None:
    """`rounds` requests one after another of each of `concurrency` clients, on an idle server.

    In one round all prompts wait for each other. Later the requests are out of step: prompts wait
    less and interrupt the answers of more. Fewer rounds for thousands of requests, None where one
    has thousands.
    """
    count, load = max(round(concurrency), 1), loop.load
    if count > _MOST_REQUESTS:
        return None
    lengths = [loop.passes + 1 if load.output_tokens > 1 else 1.0] * count
    lengths *= min(rounds, _MOST_REQUESTS // count)
    burst = Burst(
        step=loop.step,
        prompt_tokens=loop.fresh,
        budget=load.max_num_batched_tokens * loop.step.stages,
        places=load.max_running,
        lengths=lengths,
        in_flight=count,
        request_s=loop.request_s,
        factor=loop.factor,
    )
    burst.play()
    itl_s = fmean(burst.gaps_s) / loop.per_pass if burst.gaps_s else loop.at(1).itl_s
    return Wave(fmean(burst.firsts_s), itl_s, len(lengths) * load.output_tokens / burst.clock_s)
