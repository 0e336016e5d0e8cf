"""One judge: a recording in a real Prometheus gets the verdicts that its pages get.

    python -m tests.agent.fleet.test_one_judge

prints how many scrapes of all recordings are judged alike at several scrape intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from msgspec import Struct

from kneewatch.agent.fleet.engines import FleetEngines, verdicts_of
from kneewatch.agent.fleet.queries import AnswerLog, QueryScope, presence
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.fleet.inventory import label_map, shape_of
from kneewatch.diagnose.verdict import Verdict
from tests.agent.fleet.prometheus_fleet import QUICK
from tests.collector.oracle import LOOPBACK, Prometheus, Target, running
from tests.collector.oracle_targets import captured
from tests.programs import require
from tests.recordings import CAPTURES

PROFILE = Profile(window_s=15.0)
INTERVALS_S = (5.0, 15.0, 30.0)
RECORDINGS = ("kv_pressure_cascade", "spec_mixed", "lora_thrash", "restart_mid_run")
LATE_SCRAPES = 2
"""So many scrapes later the same must be said."""


class Said(Struct, frozen=True):
    """What a verdict says: stage, and causes with their severities, best first."""

    stage: int | None
    causes: tuple[tuple[str, str], ...]


def said(verdict: Verdict) -> Said:
    return Said(
        verdict.stage.number, tuple((cause.id, cause.severity.word) for cause in verdict.causes)
    )


def thinned(target: Target, every_s: float) -> Target:
    """The target as it is scraped every so many seconds."""
    kept: list[int] = []
    for at, (t_ms, _) in enumerate(target.scrapes):
        if not kept or t_ms - target.scrapes[kept[-1]][0] >= 1000 * every_s - 100:
            kept.append(at)
    return Target(f"{target.instance} {every_s:g}", [target.scrapes[at] for at in kept])


def by_pages(target: Target) -> list[Said | None]:
    """What is said after each scrape by the pages; None where the scrape failed."""
    monitor = TargetMonitor(target.instance, PROFILE)
    verdicts: list[Said | None] = []
    for t_ms, page in target.scrapes:
        judged = [] if page is None else monitor.page(t_ms / 1000, page)
        verdicts.append(said(judged[0]) if judged else None)
    return verdicts


def by_samples(target: Target, server: Prometheus) -> list[Said | None]:
    """What is said after each scrape by a real Prometheus that has scraped these pages."""
    server.load([target])
    scope = QueryScope(f'instance="{target.instance}"', PROFILE.window_s, ("instance",))
    engines = FleetEngines(PROFILE)
    verdicts: list[Said | None] = []
    with PrometheusSource(f"http://{LOOPBACK}:{server.port}", QUICK) as source:
        for t_ms, page in target.scrapes:
            at_s, log = t_ms / 1000 + 0.05, AnswerLog()
            series = log.samples("presence", source.instant(presence(scope), at_s))
            shape = shape_of([each.labels for each in series], label_map({}, "default"))
            own = scope.for_engines(shape.by, [each.labels for each in series])
            judged = engines.cycle(
                source, log, own, shape.members, {}, {}, at_s=at_s, interval_s=5.0
            )
            assert not log.failed
            newest = next(iter(verdicts_of(judged).values()), None)
            verdicts.append(None if page is None or newest is None else said(newest))
    return verdicts


def differing(pages: Sequence[Said | None], samples: Sequence[Said | None]) -> list[int]:
    """Scrapes whose verdict by pages is not the one by samples, then or up to LATE_SCRAPES
    before or after."""
    return [
        at
        for at, expected in enumerate(pages)
        if expected is not None
        and expected not in samples[max(0, at - LATE_SCRAPES) : at + LATE_SCRAPES + 1]
    ]


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with running(require("prometheus")) as server:
        yield server


@pytest.mark.parametrize("every_s", INTERVALS_S)
@pytest.mark.parametrize("name", RECORDINGS)
def test_samples_are_judged_as_pages(prometheus: Prometheus, name: str, every_s: float) -> None:
    target = thinned(captured(name), every_s)
    pages, samples = by_pages(target), by_samples(target, prometheus)
    assert any(each is not None for each in pages)
    assert differing(pages, samples) == []


if __name__ == "__main__":
    print("| recording | " + " | ".join(f"{each:g} s" for each in INTERVALS_S) + " |")
    print("| --- |" + " --- |" * len(INTERVALS_S))
    with running(require("prometheus")) as started:
        for path in sorted(CAPTURES.glob("*.jsonl.gz")):
            cells: list[str] = []
            for interval_s in INTERVALS_S:
                scraped = thinned(captured(path.name.removesuffix(".jsonl.gz")), interval_s)
                own = by_pages(scraped)
                differ = differing(own, by_samples(scraped, started))
                cells.append(f"{len(own) - len(differ)} of {len(own)}")
            print(f"| {path.name.removesuffix('.jsonl.gz')} | {' | '.join(cells)} |", flush=True)
