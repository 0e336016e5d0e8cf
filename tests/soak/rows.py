"""The daemon's rows of `make bench`: what, our figure, the peer's, how many times ours that is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.soak.fleet_footprint import fleet_footprint
from tests.soak.footprint import footprint
from tests.soak.process import MIB
from tests.soak.triage import asked

SPAN_S, WARM_S = 75.0, 45.0
MANY_CORE = 0

Row = tuple[str, str, str, str]


def daemon_rows() -> Iterator[Row]:
    """The whole daemon at three sizes, each row as soon as it is measured."""
    yield from footprint_rows(8, interval_s=5.0)
    yield from footprint_rows(100, interval_s=5.0)
    yield from footprint_rows(1000, interval_s=15.0, cpu=MANY_CORE)
    yield from fleet_rows(64, interval_s=15.0)
    yield from fleet_rows(300, interval_s=30.0)


def footprint_rows(targets: int, *, interval_s: float, cpu: int | None = None) -> Iterator[Row]:
    """The share of a core and the memory, a Prometheus scraping the same pages beside us. The ratio
    is that of CPU time."""
    usage = footprint(targets, interval_s=interval_s, for_s=SPAN_S, warm_s=WARM_S, cpu=cpu)
    ours, peer, cycles = usage.ours, usage.peer, usage.cycles
    yield (
        f"daemon, {targets} engines and GPUs at {interval_s:.0f} s",
        f"{100 * ours.cpu_ratio:.1f} %, {ours.peak_bytes / MIB:.0f} MiB",
        f"Prometheus {100 * peer.cpu_ratio:.1f} %, {peer.peak_bytes / MIB:.0f} MiB" if peer else "",
        f"{peer.cpu_ratio / ours.cpu_ratio:.2f}x" if peer else "",
    )
    yield "its cycles missed or late", f"{cycles.missed + cycles.late} of {cycles.due}", "", ""


def fleet_rows(replicas: int, *, interval_s: float) -> Iterator[Row]:
    """The daemon of a fleet, and the Prometheus that it queries. The ratio is that of CPU time."""
    usage = fleet_footprint(replicas, interval_s=interval_s, for_s=SPAN_S)
    if usage is not None:
        (ours,), peer = usage.daemons, usage.beside
        yield (
            f"fleet of {replicas} at {interval_s:.0f} s, {usage.scrape_ms:.1f} ms a scrape",
            f"{100 * ours.cpu_ratio:.1f} %, {ours.peak_bytes / MIB:.0f} MiB",
            f"Prometheus {100 * peer.cpu_ratio:.1f} %, {peer.peak_bytes / MIB:.0f} MiB",
            f"{peer.cpu_ratio / ours.cpu_ratio:.2f}x",
        )


def triage_rows() -> Iterator[Row]:
    """How long answers take at 100 requests a second, and what that does to the cycles."""
    answers = asked(per_s=100.0, for_s=60.0)
    cycles, middle_s = answers.cycles, statistics.median(answers.took_s)
    yield "triage, 100 requests/s, P50", f"{1e3 * middle_s:.1f} ms", "", ""
    yield "triage, 100 requests/s, P99", f"{1e3 * answers.p99_s:.1f} ms", "", ""
    yield "cycles missed or late", f"{cycles.missed + cycles.late} of {cycles.due}", "", ""
