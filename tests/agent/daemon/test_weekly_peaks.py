"""The peak of a week, from a real history to a recommendation."""

from __future__ import annotations

from array import array
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.daemon.baselines import WeeklyPeaks, peak_of
from kneewatch.agent.daemon.cycle import TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Series
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.rules.rule import WEEK_S
from tests.agent.daemon.factories import Kept, target
from tests.agent.running import bodies
from tests.agent.store.factories import cycle, diagnosis, written
from tests.collector.servers import Start, always, answer

NOW_S = 1_900_000_000.0
EVERY_S = 1800.0
BUSIEST = {"running": 30.0, "waiting": 12.0}


def history(folder: Path, name: str, *, days: float) -> Path:
    """A history of a target that was quiet but for one scrape, up to now."""
    path = folder / "store.db"
    scrapes = int(days * 86_400 / EVERY_S)
    busy = scrapes // 2
    written(
        path,
        *(
            cycle(
                replace(
                    diagnosis(
                        NOW_S - (scrapes - at) * EVERY_S,
                        target=name,
                        values=BUSIEST if at == busy else {"running": 2.0, "waiting": 0.0},
                    ),
                    model="tiny",
                )
            )
            for at in range(scrapes)
        ),
    )
    return path


@pytest.mark.parametrize(
    ("days", "replicas", "peak"),
    [
        pytest.param(7.5, 4, 42.0, id="a week"),
        pytest.param(3.0, 4, None, id="half a week"),
        pytest.param(7.5, None, None, id="one replica has none to spare"),
    ],
)
def test_the_peak_is_known_after_a_week(
    tmp_path: Path, days: float, replicas: int | None, peak: float | None
) -> None:
    spec = target("http://127.0.0.1:9", replicas=replicas)
    reader = Reader(history(tmp_path, spec.name, days=days))
    peaks = WeeklyPeaks(reader, lambda: [spec], wall=lambda: NOW_S)
    peaks.cycle()
    assert peaks.peak_requests(spec.name, EngineKey("tiny", "0")) == peak
    reader.close()


def test_an_engine_that_left_days_ago_is_not_looked_for(tmp_path: Path) -> None:
    spec = target("http://127.0.0.1:9", replicas=4)
    reader = Reader(history(tmp_path, spec.name, days=7.5))
    later = WeeklyPeaks(reader, lambda: [spec], wall=lambda: NOW_S + 12 * 3600)
    much_later = WeeklyPeaks(reader, lambda: [spec], wall=lambda: NOW_S + 36 * 3600)
    for peaks in (later, much_later):
        peaks.cycle()
    key = EngineKey("tiny", "0")
    assert later.peak_requests(spec.name, key) == 42.0
    assert much_later.peak_requests(spec.name, key) is None
    reader.close()


def test_hours_that_nobody_saw_may_hold_the_peak() -> None:
    hours = array("d", [NOW_S - WEEK_S + 3600 * at for at in range(168)])
    ones, nan = array("d", [1.0] * 168), float("nan")
    assert peak_of(Series(hours, {"running": ones, "waiting": ones})) == 2.0
    gap = array("d", [nan] * 20 + [1.0] * 148)
    assert peak_of(Series(hours, {"running": ones, "waiting": gap})) is None


def test_advice_knows_the_week_once_it_was_read(serving: Start, tmp_path: Path) -> None:
    spec = target(serving(always(answer(bodies("healthy_light", 0, 1)[0]))).url, replicas=8)
    reader = Reader(history(tmp_path, spec.name, days=7.5))
    peaks = WeeklyPeaks(reader, lambda: [spec], wall=lambda: NOW_S)
    assert "kneewatch has not observed a full week yet" in said(spec, peaks)
    peaks.cycle()
    assert "a window or a day" not in said(spec, peaks)
    reader.close()


def said(spec: TargetSpec, peaks: WeeklyPeaks) -> str:
    """What is said of fewer replicas after hours without work."""
    kept = Kept()
    clock = count(NOW_S, 40.0)
    sinks = replace(kept.sinks(), exchanges=(peaks.exchange,))
    watch = TargetWatch(spec, target_profile(spec.settings), sinks, wall=lambda: next(clock))
    for _ in range(450):
        watch.cycle()
    watch.retire()
    (newest,) = kept.states[-1].diagnoses
    (recommendation,) = newest.recommendations
    return recommendation.summary
