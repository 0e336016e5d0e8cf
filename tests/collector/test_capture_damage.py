"""Captures after kills, cuts, full disks and damage, and files that are no captures."""

from __future__ import annotations

import gzip
import os
import random
import resource
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError
from tests.collector.captures import NAMES, entry, line, times, write
from tests.examples import examples

NOISE = random.Random(2).randbytes(999_999)

RECORD = """
import sys
from kneewatch.collector.captures.capture import CaptureWriter, Entry
with CaptureWriter(sys.argv[1]) as writer:
    for number in range(1_000_000):
        writer.write(Entry(float(number), f"{number}\\n" * 9_000))
        print(number, flush=True)
"""

# As other recorders do it: one gzip stream, flushed line by line.
RECORD_ONE_STREAM = """
import gzip, json, sys
with gzip.open(sys.argv[1], "ab") as file:
    for number in range(1_000_000):
        file.write(json.dumps({"t": number, "body": f"{number}\\n" * 9_000}).encode() + b"\\n")
        file.flush()
        print(number, flush=True)
"""


@pytest.mark.parametrize(
    ("program", "name"), [(RECORD, "a.jsonl.gz"), (RECORD, "a.jsonl"), (RECORD_ONE_STREAM, "a.gz")]
)
def test_kill_loses_nothing_that_was_written(tmp_path: Path, program: str, name: str) -> None:
    path = tmp_path / name
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as recorder:
        assert recorder.stdout is not None
        for number_line in recorder.stdout:
            if int(number_line) == 60:
                os.kill(recorder.pid, signal.SIGKILL)
                break
        last = max([60, *(int(rest) for rest in recorder.stdout if rest.endswith("\n"))])
    assert recorder.returncode == -signal.SIGKILL
    reader = CaptureReader(path)
    got = [page.t_s for page in reader]
    assert got[: last + 1] == [float(number) for number in range(last + 1)]
    assert reader.damaged <= 1
    write(path, entry(10_000_000), entry(10_000_001))
    again = CaptureReader(path)
    assert [page.t_s for page in again] == [*got, 10_000_000.0, 10_000_001.0]
    assert again.damaged <= 1


@pytest.mark.parametrize("name", NAMES)
def test_cut_at_any_byte_and_continued(tmp_path: Path, name: str) -> None:
    three = [Entry(float(number), f"page {number}\n") for number in (1, 2, 3)]
    path = tmp_path / name
    sizes = [write(path, page).stat().st_size for page in three]
    whole = path.read_bytes()
    for size in range(sizes[0], sizes[2]):
        path.write_bytes(whole[:size])
        complete = [page for page, end in zip(three, sizes, strict=True) if end <= size]
        reader = CaptureReader(path)
        got = list(reader)
        # A line is whole before the trailer of its gzip member is, and before its line end.
        assert got[: len(complete)] == complete
        assert got == three[: len(got)]
        assert reader.damaged <= 1
        write(path, three[0])
        again = CaptureReader(path)
        assert list(again) == [*got, three[0]], size
        assert again.damaged <= 1


def test_cut_stream_of_another_recorder_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    numbers = range(200)
    parts = [
        packer.compress(line(i, f"{i * 7919 % 9973}\n" * 500)) + packer.flush(zlib.Z_SYNC_FLUSH)
        for i in numbers
    ]
    path.write_bytes(b"".join(parts)[:-20])
    write(path, entry(1000))
    reader = CaptureReader(path)
    assert [page.t_s for page in reader] == [*numbers[:-1], 1000.0]
    assert reader.damaged == 1
    assert "after line 199: near byte" in reader.first_damage
    assert "cut short" in reader.first_damage


def test_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CaptureWriter(path) as writer:
        writer.write(entry(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
        try:
            with pytest.raises(
                CaptureError, match=r"a\.jsonl\.gz: cannot be written: File too large"
            ):
                writer.write(entry(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.write(entry(3))
    reader = CaptureReader(path)
    assert [page.t_s for page in reader] == [1.0, 3.0]
    assert reader.damaged == 1


@pytest.mark.parametrize(
    "content", [b"notes, not a capture\n", gzip.compress(b"x" * 99, mtime=0), b"{}\n"]
)
def test_foreign_file_is_not_written_to(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"notes\.txt: nothing in it can be used"):
        CaptureWriter(path)
    assert path.read_bytes() == content


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder.jsonl"):
        with pytest.raises(CaptureError, match="cannot be written"):
            CaptureWriter(path)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"t": 1, "body": "\xff"}', "not JSON"),
        (b'{"t": 1, "body": "\\ud800"}', "not JSON"),
        (b'{"t": NaN, "body": ""}', "not JSON"),
        (b'{"t": 1, "body": "", "took_s": Infinity}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"t": 1, "x": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, "not JSON"),
        (b'{"t": ' + b"9" * 5_000 + b', "body": ""}', ""),
        (b'{"t": 1e999, "body": ""}', ""),
        (b"[]", "not a JSON object"),
        (b"17", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"body": ""}', '"t" is missing'),
        (b'{"t": null, "body": ""}', '"t" is missing'),
        (b'{"t": "1", "body": ""}', '"t" is no number'),
        (b'{"t": true, "body": ""}', '"t" is no number'),
        (b'{"t": [1], "body": ""}', '"t" is no number'),
        (b'{"t": -1, "body": ""}', '"t" is no time'),
        (b'{"t": 253402300800, "body": ""}', '"t" is no time'),
        (b'{"t": 1, "body": 5}', "no text"),
        (b'{"t": 1, "error": {}}', "no text"),
        (b'{"t": 1}', "neither"),
        (b'{"t": 1, "body": null, "error": ""}', "neither"),
        (b'{"t": 1, "body": "", "status": "200"}', '"status"'),
        (b'{"t": 1, "body": "", "status": true}', '"status"'),
        (b'{"t": 1, "body": "", "content_type": 7}', '"content_type"'),
        (b'{"t": 1, "body": "", "dcgm": 7}', '"dcgm"'),
        (b'{"t": 1, "body": "", "host": [1]}', '"host"'),
        (b'{"t": 1, "body": "", "host": {"host_cpu_steal_ratio": "1"}}', '"host"'),
        (b'{"t": 1, "body": "", "host": {"host_cpu_steal_ratio": true}}', '"host"'),
    ],
)
def test_damaged_line_is_counted_and_described(tmp_path: Path, bad: bytes, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(1) + b"\r\n\n" + bad + b"\n" + bad + b"\n" + line(2))
    reader = CaptureReader(path)
    assert [page.t_s for page in reader] == [1.0, 2.0]
    assert reader.damaged == 2
    assert reader.first_damage.startswith("line 4: ")
    assert why in reader.first_damage


def test_only_signals_of_the_host_are_read_from_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t": 1, "body": "", "host": {"host_cpu_steal_ratio": 0, "running": 9}}\n')
    assert [dict(entry.host) for entry in CaptureReader(path)] == [{"host_cpu_steal_ratio": 0.0}]


def test_line_without_an_end_is_read_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(1) + line(2)[:-1])
    assert times(path) == [1.0, 2.0]
    path.write_bytes(line(1) + line(2)[:-9])
    reader = CaptureReader(path)
    assert len(list(reader)) == 1
    assert reader.damaged == 1


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_line_that_is_too_long_is_passed_over(tmp_path: Path, pack: type[bytes]) -> None:
    path = tmp_path / "a.jsonl.gz"
    long = b'{"t": 5, "body": "' + bytes([97]) * (64 * 1024 * 1024) + b'"}\n'
    path.write_bytes(pack(line(1)) + pack(long) + pack(line(2)))
    reader = CaptureReader(path)
    assert [page.t_s for page in reader] == [1.0, 2.0]
    assert (reader.damaged, "too long" in reader.first_damage) == (1, True)


@examples(150)
@given(st.data())
def test_any_damage_leaves_entries_or_a_capture_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl.gz"
    text = b"".join(line(i, f"{i}\n" * 30) for i in range(6))
    whole = data.draw(st.sampled_from([text, gzip.compress(text), gzip.compress(text[:99]) * 3]))
    at = data.draw(st.integers(0, len(whole)))
    put = data.draw(st.binary(max_size=30))
    path.write_bytes(whole[:at] + put + whole[at + data.draw(st.integers(0, 60)) :])
    reader = CaptureReader(path)
    try:
        entries = list(reader)
    except CaptureError:
        assert reader.entries == 0
    else:
        assert len(entries) == reader.entries > 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(gzip.compress(b""), "it is empty", id="empty gzip"),
        pytest.param(gzip.compress(line(1))[:30], "ends inside a gzip stream", id="cut at once"),
        pytest.param(b"\x1f\x8b", "can be used", id="magic alone"),
        pytest.param(b"# HELP a b\na 1\n" * 99_999, "line 1: not JSON", id="a metrics page"),
        pytest.param(NOISE, "not JSON", id="noise"),
        pytest.param(b'{"t_send": 1.0, "ok": true}\n' * 99_999, '"t" is missing', id="other lines"),
        pytest.param(b'{"a": [\n1,\n2]}\n', "not JSON", id="JSON over lines"),
    ],
)
def test_no_capture(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "thing.dat"
    path.write_bytes(content)
    reader = CaptureReader(path)
    with pytest.raises(CaptureError) as caught:
        list(reader)
    assert "thing.dat" in str(caught.value)
    assert why in str(caught.value)
    assert 'each {"t": seconds, "body": "page"}' in str(caught.value)
    assert reader.damaged <= 100_000, "a large file that is no capture is given up early"


def test_no_file_at_all(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "a directory"), (tmp_path / "missing.jsonl", "no such file")):
        with pytest.raises(CaptureError, match=why) as caught:
            CaptureReader(path)
        assert str(path) in str(caught.value)
    with pytest.raises(CaptureError):
        CaptureReader("x" * 5_000)
    with pytest.raises(CaptureError):
        CaptureReader("nul\0byte")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", entry(1))
    path.chmod(0)
    with pytest.raises(CaptureError, match="may not be read"):
        CaptureReader(path)


def test_file_that_goes_away(tmp_path: Path) -> None:
    reader = CaptureReader(write(tmp_path / "a.jsonl.gz", entry(1)))
    (tmp_path / "a.jsonl.gz").unlink()
    with pytest.raises(CaptureError, match=r"a\.jsonl\.gz: No such file"):
        list(reader)


def test_blank_lines_without_end_are_given_up_early(tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b"\n" * 100_000 + line(1.0))
    with pytest.raises(CaptureError, match="nothing in it can be used"):
        list(CaptureReader(path))


def test_devices_and_pipes_without_a_writer_do_not_hang(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a device"):
        CaptureReader("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(CaptureError, match="it is empty"):
        list(CaptureReader(tmp_path / "pipe.jsonl"))
