"""Whether predicted bands of P99 hold what they state.

    python -m tests.tails [--hard EVERY] [--beyond]

prints for each recording, or for each EVERYth hard case, how many windows lie in the band predicted
from its other windows; with --beyond, from those with far smaller batches alone.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf

from msgspec import Struct

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.learned.knee import CurveLearner
from kneewatch.diagnose.recommend.context import LeverContext
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.prediction import After, predicted
from kneewatch.diagnose.recommend.step_times import StepTimes
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import PAGE
from tests.hard_judging import played, said
from tests.recordings import CAPTURES, LAB, NO_TARGETS, WINDOW_S, diagnoses
from tests.simulator.cases import cases

SERVER = deployment(PAGE)
BEYOND_RATIO = 2 / 3
HARD_S = 60.0
"""Windows of the hard cases, as of the daemon."""


class Told(Struct, frozen=True):
    """A window's P99, and what was predicted of it, in seconds."""

    key: str
    was_s: float
    said_s: float
    low_s: float
    high_s: float

    @property
    def is_inside(self) -> bool:
        """Whether the window lies in its band, whose ends have two digits."""
        return self.low_s <= float(f"{self.was_s:.2g}") <= self.high_s


def windows(verdicts: Iterable[Verdict], window_s: float = WINDOW_S) -> list[Verdict]:
    """Those whose windows do not overlap."""
    kept: list[Verdict] = []
    for verdict in verdicts:
        is_new = not kept or verdict.t_s - kept[-1].t_s >= window_s
        if verdict.values.get("itl_p99_s") and is_new:
            kept.append(verdict)
    return kept


def told(
    of: list[Verdict], window_s: float = WINDOW_S, *, most_ratio: float = inf
) -> Iterator[Told]:
    """What the other windows say of each, and what it was: of those with `most_ratio` times its
    batch at most."""
    for left_out in of:
        curve = CurveLearner(window_s=window_s)
        most_running = most_ratio * (left_out.values.get("running_avg") or 0.0)
        others = [verdict for verdict in of if verdict is not left_out]
        for verdict in others:
            if (verdict.values.get("running_avg") or 0.0) <= most_running:
                curve.learn(verdict.t_s, verdict.values)
        values = left_out.values
        facts = Facts(values, Targets(), config=PAGE, now_s=of[-1].t_s, window_s=window_s)
        load = demand(values, SERVER)
        steps = StepTimes.of(curve, facts.now_s)
        context = LeverContext("kv_pressure", facts, SERVER, load, curve=curve, own_steps=steps)
        numbers = predicted(context, After())
        for key in ("itl_p99", "ttft_p99"):
            was_s, said_s = values.get(f"{key}_s"), numbers.get(f"{key}_s")
            if was_s and said_s:
                yield Told(key, was_s, said_s, numbers[f"{key}_low_s"], numbers[f"{key}_high_s"])


def main() -> int:
    """Print each recording or hard case, and all together."""
    parser = ArgumentParser()
    parser.add_argument("--hard", type=int)
    parser.add_argument("--beyond", action="store_true")
    asked, everything = parser.parse_args(), list[Told]()
    every, most_ratio = asked.hard, BEYOND_RATIO if asked.beyond else inf
    named: Iterator[tuple[str, list[Told]]] = (
        (path.name.split(".")[0], [*told(windows(diagnoses(path)), most_ratio=most_ratio)])
        for path in sorted([*CAPTURES.glob("*.gz"), *LAB.glob("*.gz")])
    )
    if every is not None:
        named = (
            (
                case.name,
                [
                    *told(
                        windows(said(played(case, 1), NO_TARGETS), HARD_S),
                        HARD_S,
                        most_ratio=most_ratio,
                    )
                ],
            )
            for case in islice(cases(), None, None, every)
        )
    for name, of in named:
        everything += of
        print(f"{name:40}", _row(of), flush=True)
    print(f"{'all':40}", _row(everything))
    return 0


def _row(of: list[Told]) -> str:
    cells = list[str]()
    for key in ("itl_p99", "ttft_p99"):
        mine = [each for each in of if each.key == key]
        inside = sum(each.is_inside for each in mine)
        near = sum(1 / 1.3 <= each.said_s / each.was_s <= 1.3 for each in mine)
        wide = sorted(each.high_s / each.low_s for each in mine)
        width = f"{wide[len(wide) // 2]:5.1f}x" if wide else "     -"
        counts = f"in band {inside:3}/{len(mine):<3} within 30% {near:3}/{len(mine):<3}"
        cells.append(f"{key} {counts} band {width}")
    return "   ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
