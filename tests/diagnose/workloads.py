"""Workloads that are stated, and pages of servers that had other requests."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import exp, inf, log

from kneewatch.diagnose.lengths import ANSWERS, METRICS, PROMPTS, StatedPoint, StatedWorkload
from kneewatch.diagnose.sizing.plan.plan_result import watched
from kneewatch.diagnose.sizing.plan.workload_profile import read_profile
from tests.diagnose.streams import bodies
from tests.pages import with_values

LEVELS = ("p50", "p95", "p99", "mean")


def lengths_table(inputs: Sequence[int], outputs: Sequence[int]) -> str:
    """The table [lengths] of a profile: P50, P95, P99 and, if stated, the mean of each side."""
    rows = [
        f"{side}_{level}_tokens = {tokens}"
        for side, sizes in (("input", inputs), ("output", outputs))
        for level, tokens in zip(LEVELS, sizes, strict=False)
    ]
    return "\n".join(["[lengths]", *rows])


SMALLEST = f"""
{lengths_table((1000, 4000, 8000), (200, 500, 900))}
[traffic]
kind = "online"
archetype = "chat"
peak_requests_per_s = 120
[deployment]
model = "meta-llama/Llama-3.3-70B-Instruct"
gpus = ["h100-sxm"]
"""
"""A profile with nothing but what has to be there."""

PROFILE = SMALLEST.replace("_per_s = 120", "_per_s = 8\ngrowth_ratio = 0.25")
POINTS = (
    StatedPoint(0.5, 1000.0, 1000.0),
    StatedPoint(0.95, 4000.0, 4000.0),
    StatedPoint(0.99, 8000.0, 8000.0),
)
"""What it says of inputs."""

BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, inf)
"""Where the buckets of the recorded server end."""

Draw = Callable[[random.Random], float]


def stated(text: str = PROFILE) -> StatedWorkload:
    """What of a profile is watched."""
    return watched(read_profile(text), origin="base.toml")


def as_stated(dice: random.Random, p50: float, p95: float) -> float:
    """A length of a log-normal distribution with these percentiles, which P99 follows from."""
    return p50 * exp(log(p95 / p50) * dice.gauss(0, 1) / 1.6449)


def prompt(dice: random.Random) -> float:
    """A prompt as the profile has them: its P99 is 7,100, below the stated one."""
    return as_stated(dice, 1000.0, 4000.0)


def answer(dice: random.Random) -> float:
    """An answer as the profile has them."""
    return as_stated(dice, 200.0, 500.0)


class Requests:
    """Pages of a server that had requests of these lengths; `draws` may be changed on the way."""

    def __init__(self, *, prompts: Draw = prompt, answers: Draw = answer, seed: int = 5) -> None:
        self.draws = {PROMPTS: prompts, ANSWERS: answers}
        self._dice, self._count = random.Random(seed), 0
        self._counts: dict[str, Counter[float]] = {PROMPTS: Counter(), ANSWERS: Counter()}

    def page(self, more: int) -> str:
        """The page after so many more requests."""
        body = _first()
        self._count += more
        for side, counts in self._counts.items():
            lengths = [self.draws[side](self._dice) for _ in range(more)]
            counts.update(BOUNDS[bisect_left(BOUNDS, length)] for length in lengths)
            body = _with_lengths(body, METRICS[side], counts)
        return with_values(body, {"time_to_first_token_seconds_count": self._count})


@cache
def _first() -> str:
    return bodies("healthy_light")[0]


def _with_lengths(body: str, metric: str, counts: Counter[float]) -> str:
    def counted(line: re.Match[str]) -> str:
        return f"{line[1]} {sum(count for le, count in counts.items() if le <= float(line[2]))}"

    named = rf'(?m)^(vllm:{metric}_bucket{{.*le="([^"]+)".*}}) \S+$'
    body, replaced = re.subn(named, counted, body)
    assert replaced == len(BOUNDS)
    return with_values(body, {f"{metric}_count": counts.total()})
