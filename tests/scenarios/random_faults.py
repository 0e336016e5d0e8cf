"""Engines with random loads and faults: `python -m tests.scenarios.random_faults FIRST LAST`.

No row of a table: what callers feel is read off the pages, and a verdict is silent where latency
grew to several times its value, or many requests fail, and nothing is said at warning.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random

from msgspec import Struct

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.rules.rule import Severity
from tests.incidents.rebuilt import worded
from tests.scenarios.engine import BLOCK, Knobs
from tests.scenarios.load import Scenario, Turns
from tests.simulator.page import START_S

QUIET_S, BEGINS_S, TOLD_S, ENDS_S = 100.0, 300.0, 390.0, 660.0
"""Latency is compared between the first two and the last two of these times."""

HARM_RATIO, NO_HARM_RATIO, FAILS_FROM, TOLD_SHARE = 3.0, 1.8, 0.2, 0.8

LATENCIES = re.compile(
    r"^vllm:(e2e_request_latency_seconds|time_to_first_token_seconds|inter_token_latency_seconds)"
    r"_(sum|count)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)
SLOWER = ("slow", "decode_slow", "prefill_slow")
QUIET = ("none", "half the load", "a quarter more", "another mix")
FAULTS = (
    *SLOWER, "load", "prompt", "answer", "hit", "pauses", "hang", "request_s", "token_s",
    "fail_share", "fetch_s", "held", "giant", *QUIET,
)  # fmt: skip


def load(rng: Random) -> Knobs:
    """An engine and its load: callers in a closed loop, or up to two thirds of its capacity."""
    knobs = Knobs(
        prompt=rng.choice([150, 600, 1500, 4000, 12_000]),
        answer=rng.choice([20, 150, 400, 1200]),
        hit=rng.choice([0.0, 0.3, 0.8]),
        base_s=rng.choice([0.006, 0.012, 0.025, 0.04]),
        sequence_s=rng.choice([2e-5, 1.2e-4, 4e-4]),
        prompt_s=rng.choice([1e-5, 6e-5, 2e-4]),
        spread=rng.choice([0.2, 0.6, 1.0]),
        seats=rng.choice([32.0, 64.0, 256.0]),
        budget=rng.choice([2048.0, 8192.0]),
        blocks=rng.choice([8000.0, 40_000.0]),
    )
    knobs.blocks = max(knobs.blocks, 12 * (knobs.prompt + knobs.answer) / BLOCK)
    if rng.random() < 0.4:
        knobs.callers, knobs.think_s = (
            rng.choice([1.0, 3.0, 8.0, 20.0]),
            rng.choice([0.2, 1.0, 5.0]),
        )
        return knobs
    batch = min(knobs.seats, 0.7 * BLOCK * knobs.blocks / (knobs.prompt + knobs.answer / 2))
    request_s = knobs.prompt * (1 - knobs.hit) * knobs.prompt_s
    request_s += knobs.answer * (knobs.base_s / batch + knobs.sequence_s)
    knobs.rate = min(12.0, rng.uniform(0.1, 0.65) / request_s)
    return knobs


def fault(rng: Random, knobs: Knobs) -> tuple[str, Mapping[str, float]]:
    """A fault's name, and the knobs that it turns."""
    name, times = rng.choice(FAULTS), rng.choice([2.0, 3.0, 5.0, 10.0])
    demand = "callers" if knobs.callers else "rate"
    now = getattr(knobs, demand)
    turns: dict[str, dict[str, float]] = {
        "load": {demand: times * now},
        "prompt": {"prompt": times * knobs.prompt},
        "answer": {"answer": times * knobs.answer},
        "hit": {"hit": 0.0},
        "pauses": {
            "pause_every_s": rng.choice([10.0, 30.0, 60.0]),
            "pause_s": rng.choice([1.0, 3.0, 8.0]),
        },
        "hang": {"hang": 1.0},
        "request_s": {"request_s": rng.choice([0.02, 0.1, 0.3])},
        "token_s": {"token_s": rng.choice([2e-4, 1e-3, 5e-3])},
        "fail_share": {"fail_share": rng.choice([0.05, 0.2, 0.5])},
        "fetch_s": {"fetch_s": rng.choice([0.5, 2.0, 10.0])},
        "held": {"held": knobs.blocks * rng.choice([0.5, 0.8, 0.95])},
        "giant": {
            "giant_every_s": rng.choice([20.0, 60.0]),
            "giant": rng.choice([30_000.0, 100_000.0]),
        },
        "half the load": {demand: max(1.0, now // 2) if knobs.callers else now / 2},
        "a quarter more": {demand: now + 1 if knobs.callers else 1.25 * now},
        "another mix": {
            "prompt": rng.choice([0.7, 1.3]) * knobs.prompt,
            "answer": rng.choice([0.7, 1.3]) * knobs.answer,
        },
        **{each: {each: times} for each in SLOWER},
    }
    return name, turns.get(name, {})


class Judged(Struct, frozen=True):
    """What was said of an engine with a fault: the growth of its worst latency, the share of
    scrapes that were told at warning, and the first causes."""

    name: str
    turned: Mapping[str, float]
    growth_ratio: float
    told_share: float
    said: Counter[str]

    @property
    def is_silent(self) -> bool:
        """Whether callers are harmed and too little is said."""
        fails = self.turned.get("fail_share", 0.0) >= FAILS_FROM
        harms = self.growth_ratio >= HARM_RATIO or fails or self.name == "hang"
        return self.name not in QUIET and harms and self.told_share < TOLD_SHARE

    @property
    def is_needless(self) -> bool:
        """Whether something is said though nothing is wrong."""
        is_quiet = self.name in QUIET and self.growth_ratio < NO_HARM_RATIO
        return is_quiet and self.told_share > 0.0


def judged(seed: int) -> Judged:
    """What was said of a random engine."""
    rng = Random(seed)
    knobs = load(rng)
    name, turned = fault(rng, knobs)
    turns: Turns = {BEGINS_S: turned}
    scenario = Scenario(name=name, knobs=knobs, turns=turns, lasts_s=ENDS_S)
    stream, marks = TargetStream("m@r0", Profile(), Limits()), dict[float, dict[str, float]]()
    said, told, scrapes = Counter[str](), 0, 0
    for at_s, body in scenario.pages(seed):
        assert body is not None
        verdict = stream.take(START_S + at_s, body, "text/plain", 200)[0]
        if at_s in (QUIET_S, BEGINS_S, TOLD_S, ENDS_S):
            marks[at_s] = dict(_sums(body))
        if at_s > TOLD_S:
            scrapes, told = scrapes + 1, told + (verdict.severity >= Severity.WARNING)
            said[worded(verdict)] += 1
    growths = list(_growths(*(marks[at_s] for at_s in (QUIET_S, BEGINS_S, TOLD_S, ENDS_S))))
    return Judged(name, turned, max(growths, default=0.0), told / scrapes, said)


def _sums(body: str) -> Iterator[tuple[str, float]]:
    for metric, part, value in LATENCIES.findall(body):
        yield f"{metric}_{part}", float(value)


def _growths(*marks: Mapping[str, float]) -> Iterator[float]:
    for metric in {key.rsplit("_", 1)[0] for key in marks[0]}:
        usual_s, then_s = (_mean_s(metric, begin, end) for begin, end in (marks[:2], marks[2:]))
        if usual_s and then_s:
            yield then_s / usual_s


def _mean_s(metric: str, begin: Mapping[str, float], end: Mapping[str, float]) -> float:
    total, count = (
        end[f"{metric}_{each}"] - begin[f"{metric}_{each}"] for each in ("sum", "count")
    )
    return total / count if count else 0.0


def main() -> int:
    """Print a line for each engine of which too little or too much is said."""
    parser = ArgumentParser(prog="tests.scenarios.random_faults", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    given = parser.parse_args()
    silent = needless = 0
    for seed in range(given.first, given.last + 1):
        row = judged(seed)
        silent, needless = silent + row.is_silent, needless + row.is_needless
        if row.is_silent or row.is_needless:
            said = ", ".join(f"{words} {n}" for words, n in row.said.most_common(3))
            turned = ", ".join(f"{key} {value:g}" for key, value in row.turned.items())
            print(f"{seed:5} {row.name} ({turned}): x{row.growth_ratio:.1f}, {said}", flush=True)
    print(f"silent: {silent}, needless: {needless} of {given.last + 1 - given.first}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
