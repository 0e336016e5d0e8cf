"""Captures on a real disk: round trips, filters, files that grow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter, is_capture
from kneewatch.collector.captures.format import END_S, Entry
from kneewatch.collector.errors import CaptureError
from tests.collector.captures import NAMES, entry, line, times, write

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ENTRIES = st.builds(
    Entry,
    t_s=st.floats(0, 1e11) | st.floats(0, END_S, exclude_max=True),
    body=TEXT,
    error=TEXT,
    status=st.none() | st.integers(100, 599),
    content_type=TEXT,
    host=st.dictionaries(
        TEXT.map(lambda text: f"host_{text}"), st.floats(allow_nan=False, allow_infinity=False)
    ),
    dcgm=TEXT,
) | st.builds(Entry, t_s=st.just(1.5), body=st.none(), error=TEXT.filter(bool))


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(ENTRIES, min_size=1))
    def check(entries: list[Entry]) -> None:
        path.unlink(missing_ok=True)
        write(path, *entries)
        reader = CaptureReader(path)
        assert list(reader) == entries
        assert (reader.entries, reader.damaged, reader.first_damage) == (len(entries), 0, "")

    check()


@pytest.mark.parametrize("name", NAMES)
def test_appended_to_and_read_by_others(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, entry(1), entry(2))
    write(path, entry(3))
    reader = CaptureReader(path)
    assert [list(reader), list(reader)] == [[entry(1), entry(2), entry(3)]] * 2
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith("gz") else data
    assert [json.loads(text_line)["t"] for text_line in text.splitlines()] == [1, 2, 3]


def test_name_does_not_matter_for_reading(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(line(1.0))
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(line(1.0)))
    assert times(tmp_path / "plain.gz") == times(tmp_path / "packed.jsonl") == [1.0]
    write(tmp_path / "packed.jsonl", entry(2))
    write(tmp_path / "plain.gz", entry(2))
    assert times(tmp_path / "plain.gz") == times(tmp_path / "packed.jsonl") == [1.0, 2.0]


def test_size_of_a_page_on_disk(tmp_path: Path) -> None:
    page = "\n".join(f'vllm:bucket{{le="{i}",model="m"}} {i * i % 977}' for i in range(1_000))
    path = write(tmp_path / "a.jsonl.gz", *[Entry(float(i), page) for i in range(5)])
    assert path.stat().st_size / 5 < len(page) / 5


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", Entry(1.0, "a\ud800b", "c\udfff"))
    assert list(CaptureReader(path)) == [Entry(1.0, "a?b", "c?")]


@pytest.mark.parametrize(
    "bad",
    [
        Entry(float("nan"), "x"),
        Entry(float("inf"), "x"),
        Entry(-1.0, "x"),
        Entry(1.0, None),
        Entry(1.0, "x" * (64 * 1024 * 1024)),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, bad: Entry) -> None:
    path = tmp_path / "a.jsonl"
    with CaptureWriter(path) as writer:
        writer.write(entry(1))
        with pytest.raises(ValueError, match="an entry"):
            writer.write(bad)
    assert times(path) == [1.0]
    with pytest.raises(ValueError, match="closed"):
        writer.write(entry(2))


def test_filter_by_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    reordered = b'{"body": "x", "t": 15}\n{"body": "x", "t": 99}\n'
    path.write_bytes(b"".join(line(t) for t in (10, 20.5, 30)) + reordered)
    reader = CaptureReader(path, from_s=11, to_s=20.5)
    assert [page.t_s for page in reader] == [20.5, 15.0]
    assert (reader.entries, reader.damaged) == (2, 0)
    assert len(list(CaptureReader(path, from_s=30))) == 2
    with pytest.raises(CaptureError, match=r"its times go from 10\.000 to 99\.000"):
        list(CaptureReader(path, from_s=31, to_s=32))


@pytest.mark.parametrize("name", NAMES)
def test_reading_what_is_being_written(tmp_path: Path, name: str) -> None:
    with CaptureWriter(tmp_path / name) as writer:
        for number in range(1, 4):
            writer.write(entry(number))
            reader = CaptureReader(tmp_path / name)
            assert list(reader) == [entry(i) for i in range(1, number + 1)]
            assert reader.damaged == 0


def test_is_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recording").touch()
    Path("folder").mkdir()
    for target in (
        "a.jsonl",
        "some/where.jsonl.gz",
        "recording",
        str(tmp_path / "recording"),
        "./folder",
    ):
        assert is_capture(target), target
    for target in (
        "host:8000",
        "http://host/a.jsonl",
        "https://host:8000/x.jsonl.gz",
        "folder",
        "missing.gz",
        "",
        "x" * 5_000,
        "nul\0byte",
    ):
        assert not is_capture(target), target
