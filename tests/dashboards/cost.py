"""What evaluating the exported rules costs a real Prometheus, by the number of replicas.

    python -m tests.dashboards.cost [REPLICAS...]

Every replica is a page of its own, scraped every 15 s; half of them are a server under KV pressure.
CPU is measured before the rules are loaded and after; what the rules add is divided by evaluations
(one every 15 s) and replicas.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from msgspec import Struct

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.dashboards.playing import STEP_S, Play, prometheus, staged
from tests.recordings import CAPTURES

SCRAPING_S = 30.0
"""Before the rules are loaded."""

SETTLE_S = 75.0
"""A window and more: every rule has something to look back on."""

MEASURED_S = 120.0
"""Two evaluations of the group that is evaluated once a minute."""

PAGES = (("healthy_light", 10), ("kv_pressure_cascade", 40))
"""Recordings, and the page from which they are under the load that they are named after."""

ROW = "{:>6} {:>8} {:>9} {:>12} {:>12} {:>11} {:>12} {:>9}"


class Cost(Struct, frozen=True):
    """What so many replicas cost; `group_s` is one evaluation of each group, added up."""

    replicas: int
    series: int
    group_s: float
    scraping_cores: float
    all_cores: float
    resident_bytes: float

    @property
    def replica_s(self) -> float:
        """CPU seconds of the rules for one replica and evaluation."""
        return (self.all_cores - self.scraping_cores) * Plan().interval_s / self.replicas


def measured(replicas: int, folder: Path, plan: Plan) -> Cost:
    """A fleet of so many replicas, scraped and judged by a Prometheus of its own."""
    pages = [list(CaptureReader(CAPTURES / f"{name}.jsonl.gz"))[first:] for name, first in PAGES]
    play = Play({f"r{at}": pages[at % 2] for at in range(replicas)}, STEP_S / plan.interval_s)
    with staged(play) as stage, prometheus(stage, folder, "") as (url, pid):
        time.sleep(SCRAPING_S)
        scraping_cores, _ = _watched(url)
        (folder / "rules.yml").write_text(rule_files(plan)[RULES_FILE])
        os.kill(pid, signal.SIGHUP)
        time.sleep(SETTLE_S)
        all_cores, group_s = _watched(url)
        return Cost(
            replicas,
            round(_metric(url, "prometheus_tsdb_head_series")),
            group_s,
            scraping_cores,
            all_cores,
            _metric(url, "process_resident_memory_bytes"),
        )


def _watched(url: str) -> tuple[float, float]:
    """Cores used over a while, and the mean duration of an evaluation in it."""
    interval_s = Plan().interval_s
    first_s, started = _metric(url, "process_cpu_seconds_total"), time.monotonic()
    took: list[float] = []
    while time.monotonic() < started + MEASURED_S:
        time.sleep(interval_s)
        took.append(_metric(url, "prometheus_rule_group_last_duration_seconds"))
    used_s = _metric(url, "process_cpu_seconds_total") - first_s
    return used_s / (time.monotonic() - started), sum(took) / len(took)


def _metric(url: str, name: str) -> float:
    """A metric of Prometheus itself, all its series together; 0 where there is none."""
    with urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def main() -> None:
    """Measure the sizes that the command line names."""
    print(
        ROW.format(
            "rules",
            "replicas",
            "series",
            "evaluation",
            "scraping",
            "with rules",
            "a replica",
            "memory",
        )
    )
    for count in [int(argument) for argument in sys.argv[1:]] or [10, 100, 1000]:
        for flavour, plan in (("all", Plan()), ("alerts", Plan(lean=True))):
            with tempfile.TemporaryDirectory(prefix="kneewatch-cost-") as folder:
                cost = measured(count, Path(folder), plan)
            print(ROW.format(flavour, *_cells(cost)), flush=True)


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.replicas:,}",
        f"{cost.series:,}",
        f"{cost.group_s:.3f} s",
        f"{cost.scraping_cores:.3f} cores",
        f"{cost.all_cores:.3f} cores",
        f"{cost.replica_s * 1000:.2f} ms",
        f"{cost.resident_bytes / 2**20:,.0f} MiB",
    )


if __name__ == "__main__":
    main()
