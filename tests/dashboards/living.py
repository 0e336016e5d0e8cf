"""A fleet that lives, played to the exported rules: which alerts fire when.

    python -m tests.dashboards.living [SCRAPE_S...]
    python -m tests.dashboards.living faults [FAULT...]

The second prints a table: the alerts of each fault of `tests.living_faults`, scraped every 30 s.
promtool evaluates the rules, as fast as it can. Each of the planted faults must be told in time and
once, and operations by nothing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.page import Series
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.dashboards.promtool import evaluate
from tests.living_faults import END_S, FAULTS, FROM_S, Fault, Site
from tests.living_fleet import MIN_S, LivingFleet, operated, with_faults

FIRING = 'ALERTS{alertstate="firing", severity=~"warning|critical"}'
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Firing(Struct, frozen=True):
    """An alert, and when it began and ended, in seconds of the fleet's life; None: not yet."""

    labels: Mapping[str, str]
    begins_s: float
    ends_s: float | None

    def __str__(self) -> str:
        ends = "-" if self.ends_s is None else f"{self.ends_s / MIN_S:.2f}"
        named = ("namespace", "alertname", "severity", "ailment", "how", "model_name", "pod",
                 "Hostname")  # fmt: skip
        words = " ".join(self.labels[name] for name in named if name in self.labels)
        return f"{self.begins_s / MIN_S:6.2f} to {ends:>6} min: {words}"


def living(scrape_s: int) -> LivingFleet:
    """A fleet whose life begins where promtool's clock does."""
    return LivingFleet(scrape_s=scrape_s, epoch_s=0)


def fired(fleet: LivingFleet, plan: Plan, folder: Path, *, to_s: float) -> list[Firing]:
    """The alerts at warning or worse from the beginning of a fleet's life on."""
    rules = rule_files(replace(plan, lean=True))[RULES_FILE]
    read = set(NAME.findall(rules))
    series: dict[Series, str] = {}
    steps = int(to_s // fleet.scrape_s) + 1
    for rows in fleet.scraped(from_s=0, to_s=to_s):
        for labels, samples in rows.items():
            named = dict(labels)
            scraped_series = Series(named.pop("__name__"), tuple(named.items()))
            if scraped_series.name in read:
                series[scraped_series] = _written(samples, fleet.scrape_s, steps)
    answers = evaluate(
        folder,
        rules,
        series,
        [FIRING],
        step_s=plan.interval_s,
        steps=int(to_s // plan.interval_s) + 1,
        series_step_s=fleet.scrape_s,
    )
    shown = [{sample.labels for sample in answer} for answer in answers[FIRING]]
    return sorted(
        _firing(shown, plan.interval_s), key=lambda scraped_series: scraped_series.begins_s
    )


def _written(samples: Sequence[tuple[float, float | None]], scrape_s: int, steps: int) -> str:
    values = ["_"] * steps
    for t_s, value in samples:
        values[round(t_s / scrape_s)] = "stale" if value is None else f"{value:.10g}"
    return " ".join(values)


def _firing(shown: Sequence[set[str]], interval_s: float) -> Iterator[Firing]:
    begun: dict[str, float] = {}
    for at, now in enumerate(shown):
        for labels in [labels_before for labels_before in begun if labels_before not in now]:
            yield Firing(dict(LABEL.findall(labels)), begun.pop(labels), at * interval_s)
        for labels in now:
            begun.setdefault(labels, at * interval_s)
    for labels, begins_s in begun.items():
        yield Firing(dict(LABEL.findall(labels)), begins_s, None)


def alerted(fault: Fault, folder: Path, *, scrape_s: int = 30) -> dict[str, float]:
    """The alerts that fire in a fleet with one fault, and when: seconds since the fault began."""
    fleet = living(scrape_s)
    fault.plant(Site(fleet, fault.name))
    plan = Plan(scrape_s=scrape_s, interval_s=scrape_s)
    first_s: dict[str, float] = {}
    for firing in fired(fleet, plan, folder, to_s=END_S):
        first_s.setdefault(firing.labels["alertname"], firing.begins_s - FROM_S)
    return first_s


def table(names: Sequence[str]) -> Iterator[str]:
    """Yields the rows of a Markdown table: each fault and its alerts."""
    yield "| fault | alerts |"
    yield "| --- | --- |"
    for fault in FAULTS:
        if not names or fault.name in names:
            with tempfile.TemporaryDirectory(prefix="kneewatch-living-") as folder:
                alerts = alerted(fault, Path(folder))
            told = ", ".join(f"`{name}` after {after_s:.0f} s" for name, after_s in alerts.items())
            title = str(fault.plant.__doc__).split(". ")[0].rstrip(".")
            yield f"| {title} | {told or 'none'} |"


def main() -> None:
    """Play operations, and faults in the midst of them, at each scrape interval."""
    if sys.argv[1:2] == ["faults"]:
        for row in table(sys.argv[2:]):
            print(row, flush=True)
        return
    for scrape_s in map(int, sys.argv[1:] or ("15", "30", "60")):
        plan = Plan(scrape_s=scrape_s, interval_s=min(scrape_s, 30))
        for name, scene, to_s in (("operations", operated, 50), ("faults", with_faults, 32)):
            with tempfile.TemporaryDirectory(prefix="kneewatch-living-") as folder:
                firings = fired(scene(living(scrape_s)), plan, Path(folder), to_s=to_s * MIN_S)
            print(f"{name}, scraped every {scrape_s} s: {len(firings)} alerts", flush=True)
            print("\n".join(f"  {firing}" for firing in firings), flush=True)


if __name__ == "__main__":
    main()
