"""What `run --prometheus` takes of the machine, and what it adds to the Prometheus that it queries.

    python -m tests.soak.fleet_footprint [--replicas 100] [--interval 30] [--for 180]

Prometheus scrapes as many recorded vLLM pages as there are replicas.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from tests.agent.daemon.running import Daemon
from tests.soak.footprint import Taken, taken
from tests.soak.process import MIB
from tests.soak.prometheus import prometheus
from tests.soak.servers import servers
from tests.waiting import until

BYTES = re.compile(
    r'prometheus_http_response_size_bytes_sum\{handler="/api/v1/query"\} ([0-9.e+]+)'
)
QUERIES = re.compile(r"kneewatch_fleet_queries_total ([0-9.e+]+)")
CYCLES = re.compile(r"kneewatch_fleet_cycles_total ([0-9.e+]+)")
FAILED = re.compile(r"kneewatch_fleet_cycle_failures_total ([0-9.e+]+)")
SETTLED = 3
"""Cycles before the measurement: the first one judges the past."""

FIRST_MOST_S = 1200.0


class FleetFootprint(Struct, frozen=True):
    """What daemons that share a fleet take, and Prometheus without and with them.

    `cycle_s`: seconds between cycles of a daemon. `queries` and `received_bytes` are of all daemons
    in that time.
    """

    replicas: int
    interval_s: float
    daemons: Sequence[Taken]
    alone: Taken
    beside: Taken
    cycle_s: float
    queries: float
    received_bytes: float
    failures: float

    @property
    def scrape_ms(self) -> float:
        """Milliseconds of the daemons' CPU for each scrape of a replica."""
        used_ratio = sum(daemon.cpu_ratio for daemon in self.daemons)
        return 1e3 * used_ratio * self.interval_s / self.replicas


def number(url: str, pattern: re.Pattern[str]) -> float:
    """A number on a metrics page; 0 if the page lacks it."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        found = pattern.search(page.read().decode())
    return float(found[1]) if found else 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fleet_footprint(
    replicas: int, *, interval_s: float, for_s: float, shards: Sequence[str] = ()
) -> FleetFootprint | None:
    """Measure; None where Prometheus is not installed."""
    port = free_port()
    source = f"http://127.0.0.1:{port}"
    with (
        ExitStack() as stack,
        servers(live=replicas) as urls,
        prometheus(urls["live"], interval_s=interval_s, port=port) as peer,
    ):
        if peer is None:
            return None
        time.sleep(2 * interval_s)
        (alone,) = taken([peer], 3 * interval_s)
        daemons: list[Daemon] = []
        for shard in shards or [""]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            own = ["--fleet-shard", shard] if shard else []
            daemon = Daemon(
                folder, "--prometheus", source, "--fleet-interval", f"{interval_s}s", *own
            )
            daemons.append(stack.enter_context(daemon))
        pages = [daemon.url for daemon in daemons]

        def of_all(pattern: re.Pattern[str]) -> float:
            return sum(number(page, pattern) for page in pages)

        until(lambda: min(number(page, CYCLES) for page in pages) >= SETTLED, FIRST_MOST_S)
        asked, cycles, sent = of_all(QUERIES), of_all(CYCLES), number(source, BYTES)
        *ours, beside = taken([*(daemon.process.pid for daemon in daemons), peer], for_s)
        cycles = (of_all(CYCLES) - cycles) / len(daemons)
        return FleetFootprint(
            replicas,
            interval_s,
            ours,
            alone,
            beside,
            for_s / cycles,
            (of_all(QUERIES) - asked) / cycles,
            (number(source, BYTES) - sent) / cycles,
            of_all(FAILED),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--for", type=float, default=180.0, dest="for_s")
    parser.add_argument("--shard", action="append", default=[])
    args = parser.parse_args()
    found = fleet_footprint(
        args.replicas, interval_s=args.interval, for_s=args.for_s, shards=args.shard
    )
    if found is None:
        sys.exit("prometheus is not installed")
    print(f"{args.replicas} replicas, scraped every {args.interval:g} s, a cycle in "
          f"{found.cycle_s:.1f} s")  # fmt: skip
    for usage in found.daemons:
        print(f"run --prometheus: {usage}")
    print(
        f"{found.scrape_ms:.2f} ms of CPU for each scrape of a replica; per cycle "
        f"{found.queries:.0f} queries, {found.received_bytes / MIB:.2f} MiB; "
        f"{found.failures:.0f} failed cycles"
    )
    print(
        f"Prometheus: {100 * found.alone.cpu_ratio:.2f} % of a core alone, "
        f"{100 * found.beside.cpu_ratio:.2f} % with it"
    )


if __name__ == "__main__":
    main()
