"""Engines over their lives: told apart, restarted, gone, no longer watched; daemons too."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle
from kneewatch.agent.store.writer import Store
from kneewatch.collector.scrape_history import Restart
from kneewatch.diagnose.change import BRIDGED_S, GRACE_S, Interval
from kneewatch.rules.rule import Severity
from tests.agent.store.factories import (
    EVER,
    KEEP_ALL,
    START_S,
    STEP_S,
    cache_of,
    cause,
    counted,
    cycle,
    diagnosis,
    recorded,
    settle,
    written,
)
from tests.waiting import PATIENCE_S

Row = tuple[str, str, float, float | None, str]


def at(step: float) -> float:
    return START_S + STEP_S * step


def pressed(step: float, *, stage: int = 2, target: str = "a") -> Cycle:
    """A server under pressure."""
    kv = cause("kv_pressure", Severity.CRITICAL, at(step))
    verdict = diagnosis(at(step), target=target, health="critical", stage=stage, causes=[kv])
    return cycle(verdict, raw=counted(step))


def well(step: float, target: str = "a") -> Cycle:
    return cycle(diagnosis(at(step), target=target), raw=counted(step))


def down(step: float, target: str = "a") -> Cycle:
    causes = [cause("target_down")]
    verdict = diagnosis(
        at(step), target=target, health="warning", stage=None, causes=causes, values={}
    )
    return cycle(verdict, error="refused")


def intervals(path: Path) -> list[Interval]:
    reader = Reader(path)
    stored = reader.intervals(**EVER)
    reader.close()
    return stored


def rows(path: Path, *kinds: str) -> list[Row]:
    return [
        (
            interval.kind,
            interval.id,
            (interval.start_s - START_S) / STEP_S,
            interval.end_s,
            interval.ended,
        )
        for interval in intervals(path)
        if interval.kind in kinds
    ]


def test_causes_go_on_over_a_restart_of_the_daemon_stages_end_before_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, well(0), pressed(1), pressed(2))
    (kv,) = [interval for interval in intervals(path) if interval.kind == "cause"]
    assert (kv.end_s, kv.last_s, kv.severity) == (None, at(2), Severity.CRITICAL)
    written(path, pressed(20), pressed(21))
    assert rows(path, "cause", "stage") == [
        ("stage", "0", 0, at(1), "ended"),
        ("stage", "2", 1, at(2), "unwatched"),
        ("cause", "kv_pressure", 1, None, ""),
        ("stage", "2", 20, None, ""),
    ]


def test_what_is_over_after_a_restart_of_the_daemon_ended_before_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, pressed(0), pressed(1))
    written(path, well(20))
    (kv,) = [interval for interval in intervals(path) if interval.kind == "cause"]
    assert (kv.end_s, kv.last_s) == (None, at(1)), "not seen since; a rate may need its window"
    written(path, *map(well, range(21, 22 + int(GRACE_S / STEP_S))))
    assert rows(path, "cause", "stage", "health") == [
        ("health", "critical", 0, at(1), "unwatched"),
        ("stage", "2", 0, at(1), "unwatched"),
        ("cause", "kv_pressure", 0, at(1), "unwatched"),
        ("health", "ok", 20, at(20), "unwatched"),
        ("stage", "0", 20, at(20), "unwatched"),
        ("health", "ok", 21, None, ""),
        ("stage", "0", 21, None, ""),
    ]


def test_a_daemon_that_was_away_long_bridges_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, pressed(0), pressed(1))
    away = 2 + BRIDGED_S / STEP_S
    written(path, pressed(away))
    assert rows(path, "cause") == [
        ("cause", "kv_pressure", 0, at(1), "unwatched"),
        ("cause", "kv_pressure", away, None, ""),
    ]


def test_an_outage_of_the_target_pauses_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, pressed(0), down(1), down(2))
    (kv,) = [interval for interval in intervals(path) if interval.id == "kv_pressure"]
    assert (kv.end_s, kv.last_s) == (None, at(0))
    (down_now,) = [interval for interval in intervals(path) if interval.id == "target_down"]
    assert (down_now.end_s, down_now.last_s) == (None, at(2))
    written(path, pressed(3))
    assert rows(path, "cause") == [
        ("cause", "kv_pressure", 0, None, ""),
        ("cause", "target_down", 1, at(2), "unwatched"),
    ]


def test_a_restart_of_the_engine_ends_its_causes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    verdict = diagnosis(at(2), causes=[cause("engine_restarted")])
    anew = cycle(verdict, raw=counted(0), restart=Restart(at(2), "new"))
    written(path, pressed(0), pressed(1), anew, well(3))
    assert rows(path, "cause") == [
        ("cause", "kv_pressure", 0, at(1), "restarted"),
        ("cause", "engine_restarted", 2, at(3), "ended"),
    ]


def test_a_target_that_is_no_longer_watched_leaves_nothing_open(tmp_path: Path) -> None:
    now_s, monotonic_s = at(0), 0.0
    store = Store.open(
        tmp_path / "store.db",
        retention=KEEP_ALL,
        clock=lambda: now_s,
        monotonic=lambda: monotonic_s,
    )
    for scrape in (pressed(0), well(0, "b")):
        store.put(scrape)
    settle(store)
    while monotonic_s < BRIDGED_S + 600:
        # Never so far at once that b, too, could pass for unwatched.
        now_s, monotonic_s = now_s + 61, monotonic_s + 61
        store.put(cycle(diagnosis(now_s, target="b")))
        settle(store)
    assert list(cache_of(store).targets) == ["b"], "what has left takes no memory"
    assert len(cache_of(store).session) == 1
    store.close(PATIENCE_S)
    by_target = {e.target: e.id for e in Reader(tmp_path / "store.db").engines()}
    stored = intervals(tmp_path / "store.db")
    assert {row.ended for row in stored if row.engine_id == by_target["a"]} == {"unwatched"}
    assert {row.end_s for row in stored if row.engine_id == by_target["b"]} == {None}


def test_a_target_that_a_new_daemon_does_not_know_is_closed_too(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, pressed(0))
    now_s, monotonic_s = at(10), 0.0
    store = Store.open(path, retention=KEEP_ALL, clock=lambda: now_s, monotonic=lambda: monotonic_s)
    monotonic_s = BRIDGED_S + 1
    for _ in range(20):
        now_s += 61
        store.put(cycle(diagnosis(now_s, target="b")))
        settle(store)
    store.close(PATIENCE_S)
    assert {(o.ended, o.end_s) for o in intervals(path) if o.engine_id == 1} == {
        ("unwatched", at(0))
    }


def test_the_engine_of_a_target_that_was_never_up_ends_when_the_real_ones_come(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    nobody = replace(down(0).engines[0].diagnosis, engine="", model="")
    never = Cycle(at(0), "a", {}, (replace(down(0).engines[0], diagnosis=nobody),), "refused")
    empty = Cycle(at(2), "a", {}, ())  # not newer than the last scrape
    written(path, never, well(1), empty, well(3))
    reader = Reader(path)
    first, second = reader.engines("a")
    assert (first.model, second.model) == ("", "m")
    assert {o.ended for o in reader.intervals(engine_id=first.id, **EVER)} == {"unwatched"}
    assert {o.ended for o in reader.intervals(engine_id=second.id, **EVER)} == {""}
    assert len(reader.scrapes("a", **EVER).times) == 4
    assert reader.scrapes("a", **EVER).failed == {0: "refused"}
    reader.close()


def test_engines_of_a_page_are_told_apart_by_model_number_and_replica(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    verdicts = [
        diagnosis(at(0), engine=engine, values={"n": float(n)}) for n, engine in enumerate("010")
    ]
    whole = cycle(*verdicts, raw=counted(1.0), labels={"tier": "h100"})
    engines = (*whole.engines[:2], replace(whole.engines[2], replica="r1"))
    written(path, replace(whole, engines=engines))
    written(path, replace(whole, engines=engines, t_s=at(1), labels={"tier": "h200"}))
    reader = Reader(path)
    stored_engines = reader.engines()
    assert [(e.engine, e.replica) for e in stored_engines] == [("0", ""), ("1", ""), ("0", "r1")]
    assert {e.labels["tier"] for e in stored_engines} == {"h200"}
    first = [reader.signals(e.id, ["n"], **EVER).values["n"][0] for e in stored_engines]
    assert first == [0, 1, 2]
    reader.close()


def test_a_recording_with_a_crash_has_its_intervals(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    cycles = recorded("restart_mid_run")
    written(path, *cycles)
    failed = [scrape.t_s for scrape in cycles if scrape.error]
    stored = [interval for interval in intervals(path) if interval.id == "target_down"]
    assert len(stored) == 1
    assert failed[0] - 5 <= stored[0].start_s <= failed[0]
    assert stored[0].end_s is not None
    assert stored[0].end_s > failed[-1]
    reader = Reader(path)
    (engine,) = reader.engines()
    assert [c.restart != "" for c in reader.configs(engine.id, **EVER)] == [False, True]
    assert "engine_restarted" in {interval.id for interval in intervals(path)}
    reader.close()
