"""The simulator against the recordings, signal by signal.

    python -m tests.simulator.against [--seed N]

Each recording is played again: its arrivals (open loops) or its requests in flight (closed loops)
are read off its pages, lengths and prefixes are those of the load that made it. Figures of each
settled phase stand side by side, measured first.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from msgspec import Struct
from msgspec.structs import astuple

from tests.recordings import CAPTURES
from tests.simulator.cpu_steps import phases_of, settled
from tests.simulator.recorded import Figures, figures, scrapes
from tests.simulator.replayed import RECORDINGS, simulated


class Compared(Struct, frozen=True):
    """A settled phase, measured and simulated."""

    recording: str
    phase: str
    measured: Figures
    simulated: Figures


def compared(seed: int) -> list[Compared]:
    """Every settled phase under load of every recording that is played."""
    comparisons = list[Compared]()
    for played in RECORDINGS:
        rows = scrapes(CAPTURES / f"{played.name}.jsonl.gz")
        played_rows = simulated(played, rows, Random(seed))
        for label, phase in phases_of(played.name).items():
            if label in ("fresh", "after_load", "draining"):
                continue
            both = figures(settled(rows, phase)), figures(settled(played_rows, phase))
            comparisons.append(Compared(played.name, label, *both))
    return comparisons


def errors(comparisons: Sequence[Compared]) -> dict[str, list[float]]:
    """Errors by signal: of ratios the difference, of all else the relative one.

    Where both say that there is next to nothing (`NOTHING`), nothing is compared.
    """
    by_signal: defaultdict[str, list[float]] = defaultdict(list)
    for comparison in comparisons:
        for signal in SIGNALS:
            was, got = getattr(comparison.measured, signal), getattr(comparison.simulated, signal)
            if was is None or got is None or max(was, got) < NOTHING.get(signal, 0.0):
                continue
            by_signal[signal].append(
                got - was if signal.endswith("_ratio") else got / was - 1 if was else math.inf
            )
    return dict(by_signal)


SIGNALS = tuple(name for name in Figures.__struct_fields__ if name != "acceptance_ratio")
NOTHING = {
    "running": 0.5,
    "waiting": 1.0,
    "deferred": 0.5,
    "preemption_per_s": 0.1,
    "completed_per_s": 0.1,
}


def table(comparisons: Sequence[Compared]) -> str:
    """A row per phase, measured before simulated."""
    heads = (
        "KV",
        "running",
        "waiting",
        "deferred",
        "preempt/s",
        "hits",
        "TTFT s",
        "ITL s",
        "done/s",
    )
    lines = [f"{'recording':26}{'phase':18}" + "".join(f"{head:>15}" for head in heads)]
    for comparison in comparisons:
        cells = [
            f"{_shown(was)}/{_shown(got)}"
            for was, got, name in zip(
                astuple(comparison.measured),
                astuple(comparison.simulated),
                Figures.__struct_fields__,
                strict=True,
            )
            if name in SIGNALS
        ]
        row = "".join(f"{cell:>15}" for cell in cells)
        lines.append(f"{comparison.recording:26}{comparison.phase:18}{row}")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def summary(comparisons: Sequence[Compared]) -> str:
    """For each signal the phases compared, and the median and worst error."""
    lines = [f"{'signal':20}{'phases':>8}{'median |error|':>16}{'90 %':>8}{'worst':>8}"]
    for signal, signal_errors in errors(comparisons).items():
        size = sorted(abs(error) for error in signal_errors)
        unit = "" if signal.endswith("_ratio") else " (relative)"
        at = (len(size) // 2, min(len(size) - 1, int(0.9 * len(size))), -1)
        median, most, worst = (f"{size[place]:.2f}" for place in at)
        lines.append(f"{signal:20}{len(size):>8}{median:>16}{most:>8}{worst:>8}{unit}")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    comparisons = compared(parser.parse_args().seed)
    print(table(comparisons), "\n")
    print(summary(comparisons))


if __name__ == "__main__":
    main()
