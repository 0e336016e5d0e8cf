"""The hour of the week, from a real history to what a cycle is held against."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.daemon.baselines import SeasonalBaselines
from kneewatch.agent.daemon.cycle import TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Series, StoredEngine
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.rules.rule import HOUR_S, WEEK_S
from tests.agent.daemon.factories import Kept, target
from tests.agent.running import bodies
from tests.agent.store.factories import cycle, diagnosis, written
from tests.collector.servers import Start, always, answer

MORNING_S = 1_795_420_800.0 + 9 * HOUR_S
NOW_S = MORNING_S + 600.0
KEY = EngineKey("tiny", "0")


def history(folder: Path, name: str, *, weeks: int) -> Path:
    """A history of slow hours, one a week, the last one a week before this morning; quiet now."""
    path = folder / "store.db"
    hours = [MORNING_S - week * WEEK_S for week in range(weeks, 0, -1)]
    slow = [(from_s + 60 * at, 3.0) for from_s in hours for at in range(60)]
    written(
        path,
        *(
            cycle(replace(diagnosis(t_s, target=name, values={"ttft_p99_s": late_s}), model="tiny"))
            for t_s, late_s in [*slow, (NOW_S - 60, 0.1)]
        ),
    )
    return path


@pytest.mark.parametrize(
    ("weeks", "usual"),
    [
        pytest.param(3, {"ttft_p99_s": 3.0}, id="three weeks"),
        pytest.param(1, {}, id="one week is no habit"),
    ],
)
def test_the_hour_is_known_from_the_weeks_before(
    tmp_path: Path, weeks: int, usual: dict[str, float]
) -> None:
    spec = target("http://127.0.0.1:9")
    reader = Reader(history(tmp_path, spec.name, weeks=weeks))
    early = SeasonalBaselines(reader, lambda: [spec], wall=lambda: MORNING_S - 60)
    for seasons in (SeasonalBaselines(reader, lambda: [spec], wall=lambda: NOW_S), early):
        seasons.cycle()
        assert seasons.usual(spec.name, KEY, NOW_S) == usual, "the next hour is known as well"
        assert seasons.usual(spec.name, KEY, NOW_S - 2 * HOUR_S) == {}
        assert seasons.usual(spec.name, EngineKey("other", "0"), NOW_S) == {}
    reader.close()


class Failing(Reader):
    """A history that can be read until it cannot."""

    def __init__(self) -> None:
        self.reads, self.broken = 0, False

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """One engine, watched for long."""
        if self.broken:
            raise StoreError("gone")
        return [StoredEngine(1, target or "", "tiny", "0", "", {}, 0.0, NOW_S)]

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """Ten minutes of each hour, all alike."""
        del engine_id, to_s
        self.reads += 1
        times = array("d", [from_s + 60 * at for at in range(10)])
        return Series(times, {key: array("d", [2.0] * 10) for key in keys})


def test_each_hour_is_read_once_and_kept_while_the_history_is_gone() -> None:
    kept, now_s = Failing(), [NOW_S]
    spec = target("http://127.0.0.1:9")
    seasons = SeasonalBaselines(kept, lambda: [spec], wall=lambda: now_s[0])
    seasons.cycle()
    read = kept.reads
    seasons.cycle()
    assert kept.reads == read
    now_s[0] += HOUR_S
    seasons.cycle()
    assert kept.reads == 1.5 * read
    now_s[0], kept.broken = now_s[0] + HOUR_S, True
    seasons.cycle()
    assert seasons.usual(spec.name, KEY, now_s[0])["ttft_p99_s"] == 2.0


def test_a_cycle_is_held_against_the_hour(serving: Start, tmp_path: Path) -> None:
    spec = target(serving(always(answer(bodies("healthy_light", 0, 1)[0]))).url)
    reader = Reader(history(tmp_path, spec.name, weeks=3))
    seasons = SeasonalBaselines(reader, lambda: [spec], wall=lambda: NOW_S)
    kept = Kept()
    clock = iter([NOW_S, NOW_S + 5, NOW_S + 10, NOW_S + 15])
    sinks = replace(kept.sinks(), exchanges=(seasons.exchange,))
    watch = TargetWatch(spec, target_profile(spec.settings), sinks, wall=lambda: next(clock))
    watch.cycle()
    watch.cycle()
    assert "no baseline yet" in kept.states[-1].diagnoses[0].judged_against
    seasons.cycle()
    watch.cycle()
    watch.cycle()  # a cycle gives the values to the next one
    assert "its own baseline" in kept.states[-1].diagnoses[0].judged_against
    watch.retire()
    reader.close()
