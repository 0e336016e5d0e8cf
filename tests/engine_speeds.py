"""Speed at equal work in each phase of the recordings, beside what the clients saw: a table of
`make accuracy`, and alone `python -m tests.engine_speeds`.

A healthy engine has a speed of 1 at every load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from kneewatch.diagnose.verdict import Verdict
from tests.recordings import CAPTURES, LAB, Phase, diagnoses, every_phase

WITHIN = (0.8, 1.25)
SLOWED = frozenset({"slow_steps", "creeping", "slower_launch", "host_contention"})
UNSETTLED = frozenset({"draining", "warming", "crashes"})
"""States whose phases mix two loads or two processes: shown, not judged."""

WINDOW_S = 60.0
RECOVERED_S = 80.0
"""After a slowed phase: the account keeps 30 s, and the cause stays for 45 s."""


class Row(Struct, frozen=True):
    """A phase: its settled scrapes, the speeds known in them, and how many name slow steps.

    `seen`: its mean time between tokens as the clients saw it, over that of the first phase.
    """

    phase: Phase
    scrapes: int
    speeds: Sequence[float]
    slow_steps: int
    seen: float | None

    @property
    def is_slowed(self) -> bool:
        """Whether the engine was slowed."""
        return self.phase.state in SLOWED

    @property
    def is_judged(self) -> bool:
        """Whether the speed must be within the bounds."""
        return not self.is_slowed and self.phase.state not in UNSETTLED and bool(self.speeds)

    @property
    def is_right(self) -> bool:
        """Whether the speed is within the bounds, and no scrape names slow steps."""
        inside = all(WITHIN[0] <= speed <= WITHIN[1] for speed in self.speeds)
        return inside and not self.slow_steps


def rows(*folders: Path, window_s: float = WINDOW_S) -> Iterator[Row]:
    """A row for each phase of the recordings in these folders."""
    for folder in folders:
        said, first_s = dict[Path, Sequence[Verdict]](), dict[Path, float | None]()
        before: Phase | None = None
        for phase in every_phase(folder):
            if phase.capture not in said:
                said[phase.capture] = diagnoses(phase.capture, window_s=window_s)
                first_s[phase.capture] = phase.itl_mean_s
            again = before is not None and before.state in SLOWED and phase.state not in SLOWED
            from_s = phase.from_s + RECOVERED_S if again else phase.judged_from_s
            before = phase
            judged = [each for each in said[phase.capture] if from_s <= each.t_s <= phase.to_s]
            speeds = [each.values.get("engine_speed_ratio") for each in judged]
            seen_s, usual_s = phase.itl_mean_s, first_s[phase.capture]
            named = [cause.id for each in judged for cause in each.causes]
            yield Row(
                phase,
                len(judged),
                [speed for speed in speeds if speed is not None],
                named.count("slow_steps"),
                None if seen_s is None or usual_s is None else usual_s / seen_s,
            )


def report() -> str:
    """The table, and how many phases are within the bounds."""
    lines = [
        f"{'recording':31}{'phase':18}{'state':24}{'known':>9}{'least':>7}{'most':>7}{'clients':>9}"
    ]
    judged: list[Row] = []
    for row in rows(CAPTURES, LAB):
        if not row.speeds:
            continue
        phase, known = row.phase, f"{len(row.speeds)}/{row.scrapes}"
        seen = "" if row.seen is None else f"{row.seen:.2f}"
        mark = "  NO" if row.is_judged and not row.is_right else ""
        judged += [row] if row.is_judged else []
        lines.append(
            f"{phase.capture.name.removesuffix('.jsonl.gz'):31}{phase.name:18}{phase.state:24}"
            f"{known:>9}{min(row.speeds):7.2f}{max(row.speeds):7.2f}{seen:>9}{mark}"
        )
    lines.append(
        f"\nengine speed within {WITHIN[0]} and {WITHIN[1]}, and no slow steps named: "
        f"{sum(row.is_right for row in judged)} of {len(judged)} healthy and loaded phases"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
