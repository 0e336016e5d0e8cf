"""Recordings read some entries at a time: none is lost, those before an error come first."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent import captures
from kneewatch.agent.captures import BATCH_ENTRIES, Captures
from kneewatch.agent.console import COLLECT_AFTER, infrequent_gc
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from tests.recordings import CAPTURES
from tests.reports.documents import document


def written(path: Path, count: int, *, start_s: float = 0.0) -> str:
    """A capture of so many scrapes, one a second."""
    with CaptureWriter(path) as out:
        for number in range(count):
            out.write(Entry(start_s + number, f"page {number}"))
    return str(path)


@pytest.mark.parametrize(
    "count", [1, BATCH_ENTRIES - 1, BATCH_ENTRIES, BATCH_ENTRIES + 1, 2 * BATCH_ENTRIES, 100]
)
def test_batches_hold_every_entry_in_order(tmp_path: Path, count: int) -> None:
    paths = [
        written(tmp_path / "a.jsonl.gz", count),
        written(tmp_path / "b.jsonl.gz", count, start_s=0.5),
    ]
    batches = list(Captures(paths).batches())
    assert [numbered for batch in batches for numbered in batch] == list(Captures(paths))
    assert [len(batch) for batch in batches[:-1]] == [BATCH_ENTRIES] * (2 * count // BATCH_ENTRIES)


def test_what_was_read_before_an_error_is_told_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(CaptureReader):
        """A reader whose disk fails at its end."""

        def __iter__(self) -> Iterator[Entry]:
            yield from super().__iter__()
            raise CaptureError("the disk failed")

    path = written(tmp_path / "a.jsonl.gz", BATCH_ENTRIES + 3)
    monkeypatch.setattr(captures, "CaptureReader", Breaking)
    batches = Captures([path]).batches()
    assert len(next(batches)) == BATCH_ENTRIES
    assert [entry.t_s for _, entry in next(batches)] == [BATCH_ENTRIES + n for n in range(3)]
    with pytest.raises(CaptureError, match="the disk failed"):
        next(batches)


def test_what_is_made_of_a_page_has_no_cycles() -> None:
    stream = TargetStream("tiny", Profile(window_s=15.0), Limits())
    entries = list(CaptureReader(CAPTURES / "knee_sweep.jsonl.gz"))
    usual = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold()[0] == COLLECT_AFTER
        for entry in entries[:20]:
            stream.replay(entry)
        gc.collect()
        documents = [
            document(diagnosis) for entry in entries[20:] for diagnosis in stream.replay(entry)
        ]
        assert len(documents) == len(entries) - 20
        assert gc.collect() <= len(documents), "nothing that grows by the page"
    assert gc.get_threshold() == usual
