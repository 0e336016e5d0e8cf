"""A real Prometheus that scrapes recordings as if live, with the exported rules, against the
sidecar.

    python -m tests.dashboards.realtime [SPEED [NAME...]]

prints, for each recording, at how many evaluations the two disagree by more than one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from tests.dashboards.parity import Difference
from tests.dashboards.playing import Play, compared, play_of, prometheus, staged, summary_lines

RECORDINGS = ("kv_pressure_cascade", "queue_overload")


def played(play: Play, folder: Path, *, steps: int = 1) -> dict[str, list[Difference]]:
    """Where Prometheus and the sidecar disagree by more than so many evaluations, by recording."""
    plan = play.plan(play.scrape_s)
    rules = rule_files(plan)[RULES_FILE]
    with staged(play) as stage, prometheus(stage, folder, rules) as (url, _):
        stage.wait(after_s=plan.interval_s)
        return compared(url, play, stage, plan, steps=steps)


def main() -> None:
    """Play what the command line names."""
    speed, *names = sys.argv[1:] or ["1"]
    with tempfile.TemporaryDirectory(prefix="kneewatch-realtime-") as folder:
        by_recording = played(play_of(names or RECORDINGS, speed=float(speed)), Path(folder))
    print("\n".join(summary_lines(by_recording)))
    sys.exit(any(by_recording.values()))


if __name__ == "__main__":
    main()
