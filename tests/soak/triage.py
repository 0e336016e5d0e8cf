"""100 requests a second on the triage endpoint while eight targets are scraped at 5 s.

    python -m tests.soak.triage [--per-s 100] [--for 60] [--past | --probe]

The requests ask in turn for JSON, text and Markdown of all targets and JSON of each one; with
`--past` every second one is for how things were a moment ago, which is read from the history; with
`--probe` all are liveness probes of eight targets, of an engine that hangs and of one that starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct

from tests.agent.daemon.running import Daemon
from tests.soak.asking import asking
from tests.soak.process import cpu_s
from tests.soak.punctual import Punctual, punctual
from tests.soak.servers import servers
from tests.waiting import until

TARGETS = 8
INTERVAL_S = 5.0
WANTED_P99_S = 0.05
WARM_S = 15.0
HANGS_WITHIN_S = 300.0
"""By then an engine that hangs is called so: its prefill could have taken so long."""
ALL = "/api/v1/triage"
PAST = "&at=-10s"
STARTING = "http://127.0.0.1:1"


class Asked(Struct, frozen=True):
    """How long answers took and how late they were asked for, how the cycles did meanwhile, and the
    daemon's share of one core."""

    took_s: Sequence[float]
    asked_late_s: Sequence[float]
    cycles: Punctual
    cpu_ratio: float

    @property
    def p99_s(self) -> float:
        """What 99 of 100 answers were faster than."""
        return p99(self.took_s)


def p99(values: Sequence[float]) -> float:
    """What 99 of 100 are lower than; the largest of fewer than two, 0 of none."""
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else max(values, default=0.0)


def paths(names: Sequence[str], *, past: bool) -> list[str]:
    """What is asked for, in turn."""
    plain_paths: list[str] = []
    for name in names:
        target_path = f"{ALL}/{quote(name, safe='')}?format=json"
        plain_paths += [f"{ALL}?format={form}" for form in ("json", "text", "markdown")] + [
            target_path
        ]
    return [path + (PAST if past and at % 2 else "") for at, path in enumerate(plain_paths)]


def asked(
    *,
    per_s: float,
    for_s: float,
    warm_s: float = WARM_S,
    past: bool = False,
    probe: bool = False,
) -> Asked:
    """Measure."""
    with tempfile.TemporaryDirectory() as name, servers(live=TARGETS, frozen=int(probe)) as urls:
        folder, names = Path(name), urls["live"]
        beside = [*urls["frozen"], STARTING] if probe else []
        with Daemon(
            folder, *names, *beside, "--interval", f"{INTERVAL_S}s", "--gpu-metrics", "none"
        ) as daemon:
            host, pid = daemon.url.removeprefix("http://"), daemon.process.pid
            time.sleep(warm_s)
            asked_paths = paths(names, past=past)
            if probe:
                asked_paths = [f"/probe/{quote(name, safe='')}" for name in (*names, *beside)]
                hangs, starts = (f"{daemon.url}/probe/{name}" for name in beside)
                until(lambda: _is_hung(hangs), HANGS_WITHIN_S)
                assert _status(starts) == HTTPStatus.OK
            from_s, used_s = time.time(), cpu_s(pid)
            with asking(host, asked_paths, per_s=per_s, for_s=for_s) as people:
                said, _ = people.communicate()
            to_s = time.time()
            cpu_ratio = (cpu_s(pid) - used_s) / (to_s - from_s)
            time.sleep(1.0)
            assert "Traceback" not in daemon.log, daemon.log
            cycles = punctual(
                folder / "kneewatch.db", names, interval_s=INTERVAL_S, from_s=from_s, to_s=to_s - 1
            )
    took_s, late_s = json.loads(said)
    return Asked(took_s, late_s, cycles, cpu_ratio)


def _is_hung(url: str) -> bool:
    time.sleep(1.0)
    return _status(url) == HTTPStatus.SERVICE_UNAVAILABLE


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def main() -> None:
    """Measure, print, compare with what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-s", type=float, default=100.0)
    parser.add_argument("--for", type=float, default=60.0, dest="for_s")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--past", action="store_true")
    kind.add_argument("--probe", action="store_true")
    args = parser.parse_args()
    answers = asked(per_s=args.per_s, for_s=args.for_s, past=args.past, probe=args.probe)
    print(
        f"{len(answers.took_s)} requests at {args.per_s:g} a second: "
        f"P50 {1000 * statistics.median(answers.took_s):.1f} ms, "
        f"P99 {1000 * answers.p99_s:.1f} ms, "
        f"at most {1000 * max(answers.took_s):.1f} ms; {100 * answers.cpu_ratio:.1f} % of one core"
    )
    print(f"the asking process itself was late by {1000 * p99(answers.asked_late_s):.1f} ms (P99)")
    print(answers.cycles)
    if answers.p99_s > WANTED_P99_S or not answers.cycles.on_time:
        sys.exit(f"not kept: P99 {1000 * WANTED_P99_S:.0f} ms, all cycles on time")


if __name__ == "__main__":
    main()
