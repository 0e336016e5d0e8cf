"""Documents of the past that cannot be exact say of which moment they are; chains are bounded."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from kneewatch.agent.store.encoding import CHAIN_MAX_LINKS, encode_document, verdict_at_scrape
from kneewatch.agent.store.reader import Reader
from tests.agent.store.factories import START_S, STEP_S, cause, cycle, diagnosis, recorded, written
from tests.agent.store.test_schema import CYCLES, RECORDING, of_version
from tests.reports.documents import document_then

SICK = diagnosis(START_S, causes=[cause("kv_pressure")], values={"running": 3.0})


def test_evidence_that_is_older_than_its_moment_says_so() -> None:
    stored, values = encode_document(SICK), {"running": 5.0}
    later_s = START_S + 40

    def unknown(*, averaged: bool, exact: bool, t_s: float = later_s) -> list[str]:
        verdict = verdict_at_scrape(stored, t_s, values, averaged=averaged, exact=exact)
        assert verdict.values == values
        return list(verdict.unknown)

    older = "causes: causes and evidence are as of 11:06:40"
    mean = "signals: downsampled to one-minute means at this age"
    assert unknown(averaged=False, exact=True) == []
    assert unknown(averaged=False, exact=False) == [older]
    assert unknown(averaged=False, exact=False, t_s=START_S) == []
    assert unknown(averaged=True, exact=True) == [mean, older]


def test_a_cause_that_is_concluded_at_every_scrape_is_kept_once(tmp_path: Path) -> None:
    path, times_s = tmp_path / "store.db", [START_S + STEP_S * at for at in range(6)]
    seen_s, held = [*times_s[:3], *[times_s[2]] * 3], cause("kv_pressure", since_s=START_S)
    cycles = [
        cycle(diagnosis(t_s, stage_since_s=START_S, causes=[replace(held, seen_s=s)]))
        for t_s, s in zip(times_s, seen_s, strict=True)
    ]
    written(path, *cycles)
    with closing(sqlite3.connect(path)) as connection:
        (encode_document,) = connection.execute("SELECT count(*) FROM documents").fetchone()
    assert encode_document == 2, "while it is concluded, and while it only lingers"
    reader = Reader(path)
    documents = [document_then(reader, 1, t_s) for t_s in times_s]
    assert [
        document["causes"][0]["seen"] for document in documents if document is not None
    ] == seen_s
    reader.close()


def test_a_store_of_an_earlier_version_says_of_when_its_evidence_is(tmp_path: Path) -> None:
    path = of_version(1, tmp_path)
    written(path, recorded(RECORDING)[CYCLES])
    reader = Reader(path)
    (engine,) = [engine for engine in reader.engines() if engine.model]
    documents = [
        document_then(reader, engine.id, scrape.t_s) for scrape in recorded(RECORDING)[:CYCLES]
    ]
    sick = [document for document in documents if document is not None and document["causes"]]
    as_of = [
        document
        for document in sick
        if any("evidence are as of" in line for line in document["unknown"])
    ]
    assert 0 < len(as_of) < len(sick)
    reader.close()


def test_a_document_is_read_by_way_of_few_others(tmp_path: Path) -> None:
    path, count = tmp_path / "store.db", 5 * CHAIN_MAX_LINKS
    cycles = [
        cycle(diagnosis(START_S + STEP_S * at, causes=[cause(f"cause_{at}")]))
        for at in range(count)
    ]
    written(path, *cycles)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT id, base_id FROM documents").fetchall()
    bases = dict(rows)
    assert len(bases) == count

    def links(row: int | None) -> int:
        return 0 if row is None else 1 + links(bases[row])

    assert 2 < max(map(links, bases)) <= CHAIN_MAX_LINKS + 1
    reader = Reader(path)
    for at, scrape in enumerate(cycles):
        document = document_then(reader, 1, scrape.t_s)
        assert document is not None
        assert [named["id"] for named in document["causes"]] == [f"cause_{at}"]
    reader.close()
