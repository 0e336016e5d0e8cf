"""What the daemon takes of the machine, a real Prometheus scraping the same pages beside it.

    python -m tests.soak.footprint [--targets 8] [--interval 5] [--for 180] [--cpu N]

Eight engines and a GPU page, or as many engines as you like. History and API are on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from tests.agent.daemon.running import Daemon
from tests.soak.process import MIB, cpu_s, peak_bytes, rss_bytes, threads
from tests.soak.prometheus import prometheus
from tests.soak.punctual import Punctual, punctual
from tests.soak.servers import servers

MANY = 100
"""From so many targets on the wishes for many hold."""

FEW_CPU_RATIO, FEW_BYTES = 0.02, 80 * MIB
MANY_CPU_RATIO, MANY_BYTES = 1.0, 1024 * MIB


class Taken(Struct, frozen=True):
    """What a process took in a span: of one core, and memory at its end and at most."""

    cpu_ratio: float
    rss_bytes: int
    peak_bytes: int
    threads: int

    def __str__(self) -> str:
        """The figures in words."""
        return (
            f"{100 * self.cpu_ratio:.2f} % of one core, RSS {self.rss_bytes / MIB:.1f} MiB "
            f"(at most {self.peak_bytes / MIB:.1f}), {self.threads} threads"
        )


class Footprint(Struct, frozen=True):
    """The daemon, Prometheus where it is installed, and the daemon's cycles."""

    ours: Taken
    peer: Taken | None
    cycles: Punctual
    store_bytes: int


def taken(pids: Sequence[int], span_s: float) -> list[Taken]:
    """What some processes take from now on."""
    before = [cpu_s(pid) for pid in pids]
    began_s = time.monotonic()
    time.sleep(span_s)
    passed_s = time.monotonic() - began_s
    return [
        Taken((cpu_s(pid) - used_s) / passed_s, rss_bytes(pid), peak_bytes(pid), threads(pid))
        for pid, used_s in zip(pids, before, strict=True)
    ]


def footprint(
    targets: int, *, interval_s: float, for_s: float, warm_s: float, cpu: int | None = None
) -> Footprint:
    """Measure. `cpu`: the core that the daemon is kept to."""
    with tempfile.TemporaryDirectory() as name, servers(live=targets, gpu=1) as urls:
        folder, (gpu,) = Path(name), urls["gpu"]
        file_sd = folder / "targets.json"
        file_sd.write_text(json.dumps([{"targets": urls["live"]}]))
        with (
            Daemon(
                folder, "--file-sd", file_sd, "--interval", f"{interval_s}s",
                "--gpu-interval", f"{interval_s}s", "--gpu-metrics", gpu,
            ) as daemon,
            prometheus([*urls["live"], gpu], interval_s=interval_s) as peer,
        ):  # fmt: skip
            pid = daemon.process.pid
            if cpu is not None:
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {cpu})
            assert daemon.url
            time.sleep(warm_s)
            from_s = time.time()
            figures = taken([pid] if peer is None else [pid, peer], for_s)
            to_s = time.time() - interval_s
            cycles = punctual(
                folder / "kneewatch.db",
                urls["live"],
                interval_s=interval_s,
                from_s=from_s,
                to_s=to_s,
            )
            store_bytes = sum(file.stat().st_size for file in folder.glob("kneewatch.db*"))
            if "level=error" in daemon.log or "Traceback" in daemon.log:
                sys.exit(daemon.log)
    return Footprint(figures[0], figures[1] if peer else None, cycles, store_bytes)


def main() -> None:
    """Measure, print, compare with what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--for", type=float, default=180.0, dest="for_s")
    parser.add_argument("--warm", type=float, default=75.0)
    parser.add_argument("--cpu", type=int)
    args = parser.parse_args()
    usage = footprint(
        args.targets,
        interval_s=args.interval,
        for_s=args.for_s,
        warm_s=args.warm,
        cpu=args.cpu,
    )
    print(f"{args.targets} engines and a GPU page at {args.interval:g} s for {args.for_s:g} s")
    print(f"kneewatch: {usage.ours}; history {usage.store_bytes / MIB:.1f} MiB")
    print(f"Prometheus: {usage.peer or 'is not installed'}")
    print(usage.cycles)
    many = args.targets >= MANY
    most_cpu_ratio = MANY_CPU_RATIO if many else FEW_CPU_RATIO
    most_bytes = MANY_BYTES if many else FEW_BYTES
    broken = [
        what
        for what, kept in (
            (f"{100 * most_cpu_ratio:.0f} % of one core", usage.ours.cpu_ratio <= most_cpu_ratio),
            (f"{most_bytes / MIB:.0f} MiB", usage.ours.peak_bytes <= most_bytes),
            ("cycles on time", usage.cycles.on_time),
        )
        if not kept
    ]
    if broken:
        sys.exit(f"not kept: {', '.join(broken)}")


if __name__ == "__main__":
    main()
