"""The past from a real store: killed servers, vanished targets, full disks, damage."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.api.alerts import stored_engines, stored_verdict
from kneewatch.agent.api.service import History
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle
from kneewatch.agent.store.writer import Store
from tests.agent.api.serving import Asker, asking, service_of
from tests.agent.api.test_triage import JSON, TRIAGE, told
from tests.agent.store.disks import files_of_at_most
from tests.agent.store.factories import (
    KEEP_ALL,
    STEP_S,
    cause,
    cycle,
    diagnosis,
    settle,
    written,
)
from tests.reports.diagnoses import NOW_S
from tests.waiting import PATIENCE_S, until

BEGAN_S = NOW_S - 60 * STEP_S


def well(at: int) -> Cycle:
    return cycle(diagnosis(BEGAN_S + STEP_S * at, values={"running": float(at)}))


def down(at: int) -> Cycle:
    verdict = diagnosis(
        BEGAN_S + STEP_S * at, health="critical", stage=None, causes=[cause("target_down")],
        values={},
    )  # fmt: skip
    return cycle(verdict, error="refused")


@contextmanager
def asked(path: Path, store: Store | None = None) -> Generator[Asker]:
    """A client of a daemon with this history."""
    reader = Reader(path)
    with asking(service_of(names=["a"], reader=reader, store=store)) as client:
        yield client
    reader.close()


def spans(client: Asker, kind: str, query: str = "since=-1h") -> list[tuple[Any, ...]]:
    """Id, beginning and end in scrapes, and how it ended."""
    rows = told(client, f"{TRIAGE}?{query}")["intervals"]
    return [
        (
            row["id"],
            round((row["start"] - BEGAN_S) / STEP_S),
            row["end"] and round((row["end"] - BEGAN_S) / STEP_S),
            row["ended"],
        )
        for row in rows
        if row["kind"] == kind
    ]


def test_a_stage_of_a_killed_server_ended_when_it_was_told_last(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, *map(well, range(30)), *map(down, range(30, 61)))
    with asked(path) as client:
        assert spans(client, "stage") == [("0", 0, 29, "unwatched")]
        assert spans(client, "cause") == [("target_down", 30, None, "")]
        plain = client.get(f"{TRIAGE}?since=-1h").text
        page = client.get("/triage").text
    (line,) = [line for line in plain.splitlines() if "stage 0" in line]
    assert "to now" not in line
    assert "then it was not watched" in plain
    assert page


def test_a_target_that_nobody_scrapes_any_more_goes_on_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, *map(well, range(30)))
    with asked(path) as client:
        for kind in ("stage", "health"):
            ((_, start, end, ended),) = spans(client, kind)
            assert (start, end, ended) == (0, 29, "unwatched")
        then = f"at={BEGAN_S + 20 * STEP_S}&since=-1h"
        assert spans(client, "stage", then) == [("0", 0, None, "")], "then it went on"


def test_a_full_disk_is_told_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store.open(path, retention=KEEP_ALL)
    for at in range(40):
        store.put(well(at))
    settle(store)
    with files_of_at_most(1), asked(path, store) as client:
        for at in range(40, 60):
            store.put(well(at))
        until(lambda: store.stats().unwritten_s is not None)
        since_s = store.stats().unwritten_s
        before = told(client, f"{TRIAGE}?at={BEGAN_S + 10 * STEP_S}")
        plain = client.get(f"{TRIAGE}?at={BEGAN_S + 10 * STEP_S}").text
        now = client.get(TRIAGE).text
        page = client.get("/triage").text
        missing = client.get(f"{TRIAGE}?at=-3d").json()["detail"]
    assert before["targets"][0]["signals"] == {"running": 10.0}
    assert since_s == pytest.approx(BEGAN_S + 40 * STEP_S, abs=1)
    words = "the history is not written since 00:05:00 UTC"
    assert words in before["notices"][0]
    for text in (plain, now, page, missing):
        assert words[4:] in " ".join(text.split())
    settle(store)
    assert store.stats().unwritten_s is None
    store.close(PATIENCE_S)


def broken(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE documents SET body = x'00'", "UPDATE open_signals SET body = x'0011'"],
    ids=["document", "signals"],
)
def test_a_damaged_moment_is_one_of_which_nothing_is_stored(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, *map(well, range(60)))
    broken(path, statement)
    with asked(path) as client:
        missing = client.get(f"{TRIAGE}?at=-1m", accept=JSON)
        page = client.get("/triage?at=-1m").text
    assert missing.status_code == 404
    assert missing.json()["detail"].startswith("nothing is stored of that moment; the history ")
    assert "othing is stored of that moment" in page
    reader = Reader(path)
    history = History(reader)
    replicas = stored_engines(history)[0]["a"]["m", "0"]
    look, why = stored_verdict(history, replicas, NOW_S - 60)
    assert (look, why) == (None, "unknown: nothing is stored of that time")
    reader.close()


def test_damage_of_one_target_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    def both(at: int) -> Sequence[Cycle]:
        t_s = BEGAN_S + STEP_S * at
        return [cycle(diagnosis(t_s, target=name)) for name in ("a", "b")]

    written(path, *[scrape for at in range(60) for scrape in both(at)])
    broken(path, "UPDATE documents SET body = x'00' WHERE engine_id = 1")
    with asked(path) as client:
        triage = told(client, f"{TRIAGE}?at=-1m")
    assert [target["target"] for target in triage["targets"]] == ["b"]
