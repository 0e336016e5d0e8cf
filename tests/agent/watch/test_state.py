"""The wall: worst first, what is not heard of is not healthy, histories that do not grow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.agent.watch.state import CHARTED, KEPT, Kind, RowKey, ScreenState, Trail
from tests.agent.watch.screens import SERVER, Clock, three, told
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, UNREADABLE, changed

KEY = RowKey(SERVER, SERVER, "llama", "0")


def test_worst_first_then_by_name() -> None:
    wall = three()
    told(wall, changed(HEALTHY, health="unknown"), source="d-unknown")
    told(wall, changed(HEALTHY, health="info"), source="e-noted")
    names = [row.name for row in wall.rows()]
    assert names == ["b-sick", "d-unknown", "e-noted", "a-well", "c-well"]


def test_a_source_shows_before_it_tells_anything() -> None:
    wall = ScreenState(clock=Clock())
    wall.expect(SERVER, Kind.SERVER, patience_s=10.0)
    (row,) = wall.rows()
    assert (row.name, row.diagnosis, row.health) == (SERVER, None, "unknown")


def test_silence_is_not_health() -> None:
    clock = Clock()
    wall = three(clock)
    clock.now_s += 9.0
    assert [row.health for row in wall.rows()] == ["critical", "ok", "ok"]
    clock.now_s += 2.0
    assert [row.health for row in wall.rows()] == ["critical", "unknown", "unknown"]
    assert all(row.stale and row.quiet_s == 11.0 for row in wall.rows())
    told(wall, HEALTHY, source="a-well")
    assert [row.health for row in wall.rows()] == ["critical", "unknown", "ok"]


def test_a_recording_that_has_ended_is_not_silent() -> None:
    clock = Clock()
    wall = ScreenState(clock=clock)
    wall.expect("r0", Kind.RECORDING, patience_s=0.0)
    wall.put("r0", [HEALTHY], now_s=NOW_S)
    wall.set_note("r0", "it has ended")
    clock.now_s += 1e6
    (row,) = wall.rows()
    assert (row.health, row.stale, row.quiet_s, row.note) == ("ok", False, 0.0, "it has ended")


def test_what_a_daemon_calls_late_or_pending() -> None:
    wall = ScreenState(clock=Clock())
    wall.expect("daemon", Kind.DAEMON, patience_s=10.0)
    assert [row.name for row in wall.rows()] == ["daemon"]
    late = replace(HEALTHY, target="late", t_s=NOW_S - 90)
    wall.put(
        "daemon",
        [replace(HEALTHY, target="fresh"), late],
        now_s=NOW_S,
        late={"late"},
        pending=["new"],
    )
    told_ = {row.name: (row.health, round(row.quiet_s)) for row in wall.rows()}
    assert told_ == {"late": ("unknown", 90), "new": ("unknown", 0), "fresh": ("ok", 0)}
    wall.put("daemon", [], now_s=NOW_S)
    assert wall.rows() == []
    wall.set_note("daemon", "connection refused")
    assert wall.daemon_notes() == ["connection refused"]
    wall.put("daemon", [HEALTHY], now_s=NOW_S)
    assert wall.daemon_notes() == []


def test_engines_of_a_target_are_told_apart() -> None:
    wall = ScreenState(clock=Clock())
    told(wall, HEALTHY, replace(HEALTHY, engine="1"))
    assert [row.name for row in wall.rows()] == [f"{SERVER} engine 0", f"{SERVER} engine 1"]
    told(wall, HEALTHY, replace(HEALTHY, model="qwen"))
    assert [row.name for row in wall.rows()] == [
        f"{SERVER} llama engine 0",
        f"{SERVER} qwen engine 0",
    ]
    told(wall, HEALTHY, SICK)
    assert [row.health for row in wall.rows()] == ["critical", "ok"]


def test_an_engine_that_is_not_told_of_is_forgotten() -> None:
    wall = ScreenState(clock=Clock())
    told(wall, HEALTHY, replace(HEALTHY, engine="1"))
    wall.put(SERVER, [replace(HEALTHY, target=SERVER)], now_s=NOW_S)
    assert [row.name for row in wall.rows()] == [SERVER]
    assert not wall.trail(KEY._replace(engine="1")).times_s


def test_a_history_has_each_moment_once() -> None:
    wall = ScreenState(clock=Clock())
    told(wall, HEALTHY)
    for t_s in (NOW_S, NOW_S + 2, NOW_S + 2, NOW_S + 4):
        wall.put(SERVER, [replace(HEALTHY, target=SERVER, t_s=t_s)], now_s=t_s)
    wall.put(SERVER, [replace(UNREADABLE, target=SERVER, t_s=NOW_S + 6)], now_s=NOW_S + 6)
    trail = wall.trail(KEY)
    assert list(trail.times_s) == [NOW_S, NOW_S + 2, NOW_S + 4, NOW_S + 6]
    assert [value == value for value in trail.values["kv_usage_ratio"]] == [True, True, True, False]


def test_a_history_does_not_grow_for_ever() -> None:
    trail = Trail()
    for number in range(5 * KEPT):
        trail.add(float(number), dict.fromkeys(CHARTED, 1.0))
        assert len(trail.times_s) <= 2 * KEPT
    copy = trail.copy()
    assert len(copy.times_s) == KEPT
    assert copy.times_s[-1] == 5 * KEPT - 1
    assert {len(column) for column in copy.values.values()} == {KEPT}


@pytest.mark.parametrize("back_s", [0.0, 3600.0])
def test_a_clock_that_is_set_back_begins_anew(back_s: float) -> None:
    trail = Trail()
    trail.add(NOW_S, {})
    trail.add(NOW_S - back_s, {"waiting": 1.0})
    assert list(trail.times_s) == [NOW_S - back_s]
    assert list(trail.values["waiting"]) == [1.0]
