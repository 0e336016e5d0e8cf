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
from pathlib import Path

from tests.agent.daemon.running import Daemon
from tests.soak.footprint import taken
from tests.soak.process import MIB
from tests.soak.prometheus import prometheus
from tests.soak.servers import servers

BYTES = re.compile(
    r'prometheus_http_response_size_bytes_sum\{handler="/api/v1/query"\} ([0-9.e+]+)'
)
QUERIES = re.compile(r"kneewatch_fleet_queries_total ([0-9.e+]+)")
FAILED = re.compile(r"kneewatch_fleet_cycle_failures_total ([0-9.e+]+)")


def number(url: str, pattern: re.Pattern[str]) -> float:
    """A number on a metrics page; 0 if the page lacks it."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        found = pattern.search(page.read().decode())
    return float(found[1]) if found else 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--for", type=float, default=180.0, dest="for_s")
    parser.add_argument("--shard", action="append", default=[])
    args = parser.parse_args()
    port = free_port()
    source = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as name,
        servers(live=args.replicas) as urls,
        prometheus(urls["live"], interval_s=args.interval, port=port) as peer,
    ):
        if peer is None:
            sys.exit("prometheus is not installed")
        time.sleep(2 * args.interval)
        (alone,) = taken([peer], 3 * args.interval)
        daemons: list[Daemon] = []
        for at, shard in enumerate(args.shard or [""]):
            folder = Path(name) / str(at)
            folder.mkdir()
            own = ["--fleet-shard", shard] if shard else []
            daemons.append(
                Daemon(folder, "--prometheus", source, "--fleet-interval",
                       f"{args.interval}s", *own).__enter__()
            )  # fmt: skip
        pages = [daemon.url for daemon in daemons]
        time.sleep(4 * args.interval)  # the first cycle judges the past
        began = [number(page, QUERIES) for page in pages]
        sent = number(source, BYTES)
        *ours, beside = taken([*(daemon.process.pid for daemon in daemons), peer], args.for_s)
        cycles = args.for_s / args.interval
        asked = sum(number(page, QUERIES) for page in pages) - sum(began)
        received = number(source, BYTES) - sent
        failures = sum(number(page, FAILED) for page in pages)
        print(f"{args.replicas} replicas scraped and judged every {args.interval:g} s")
        for usage in ours:
            print(f"run --prometheus: {usage}")
        print(
            f"per cycle: {asked / cycles:.0f} queries, {received / cycles / MIB:.2f} MiB; "
            f"{failures:.0f} failed cycles"
        )
        print(
            f"Prometheus: {100 * alone.cpu_ratio:.2f} % of a core alone, "
            f"{100 * beside.cpu_ratio:.2f} % with it"
        )
        for daemon in daemons:
            daemon.__exit__()


if __name__ == "__main__":
    main()
