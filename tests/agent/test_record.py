"""`record` as a process that is killed, interrupted, restarted, and read while it writes."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from tests.agent.running import Main, bodies, ended, in_turn, start, wait_for
from tests.agent.test_diagnose_live import GPU_PAGE, unused_url
from tests.collector.servers import Server, Start, answer
from tests.waiting import PATIENCE_S

QUICK = ("--interval", "0.05s")


@pytest.fixture
def server(serving: Start) -> Server:
    """A server of a healthy recording's pages."""
    return serving(in_turn(bodies("healthy_light", 10)))


@contextmanager
def recording(server: Server, file: Path, scrapes: int) -> Generator[subprocess.Popen[str]]:
    """A recorder that has been asking for so many pages."""
    with start("record", server.url, file, *QUICK, cwd=file.parent) as process:
        try:
            wait_for(server, scrapes)
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def test_what_was_scraped_before_a_kill_is_readable(
    server: Server, main: Main, tmp_path: Path
) -> None:
    file = tmp_path / "killed.jsonl.gz"
    with recording(server, file, 8) as process:
        process.kill()
        assert ended(process).status == -signal.SIGKILL
    done = main("replay", file, "--format", "json")
    assert done.status == 0
    assert len(done.documents) >= 7
    assert "damaged" not in done.err, "an entry goes out in one write"
    assert {document["model"] for document in done.documents} == {"tiny"}


@pytest.mark.usefixtures("clock")
def test_a_file_that_exists_is_added_to(server: Server, main: Main, tmp_path: Path) -> None:
    file = tmp_path / "added.jsonl.gz"
    with recording(server, file, 3):
        pass
    before = [entry.t_s for entry in CaptureReader(file)]
    file.write_bytes(file.read_bytes() + b"\x1f\x8b\x08\x00cut by the kill")
    done = main("record", server.url, file, "--for", "0.3s", "--interval", "0.1s")
    assert done.status == 0
    after = [entry.t_s for entry in CaptureReader(file)]
    assert after[: len(before)] == before
    assert len(after) == len(before) + 4
    assert "1 damaged entries skipped" in main("replay", file).err


def test_ctrl_c_ends_it_with_a_count(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "interrupted.jsonl.gz"
    with recording(server, file, 3) as process:
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert (done.status, done.out) == (0, "")
    first, last = done.err.splitlines()
    assert first.endswith(f"{server.url} every 50 ms to {file}; Ctrl-C ends it")
    pages = len(list(CaptureReader(file)))
    assert last == f"kneewatch: {file}: {pages} pages, 0 failed scrapes"
    assert pages >= 2


def test_a_capture_is_read_while_it_grows(server: Server, main: Main, tmp_path: Path) -> None:
    file = tmp_path / "growing.jsonl.gz"
    with recording(server, file, 3) as process:
        counts: list[int] = []
        for _ in range(3):
            wait_for(server, 3)
            done = main("replay", file, "--format", "json")
            assert done.status == 0
            counts.append(len(done.documents))
        process.kill()
    assert counts[0] >= 3
    assert counts[0] < counts[1] < counts[2]


def test_gpus_are_recorded_and_replayed(
    server: Server, serving: Start, main: Main, tmp_path: Path
) -> None:
    file, late = tmp_path / "gpus.jsonl", tmp_path / "late.jsonl"
    exporter = serving(in_turn([GPU_PAGE]))
    gpus = ("--gpu-metrics", exporter.url)
    done = main("record", server.url, file, "--for", "1s", "--interval", "0.2s", *gpus)
    assert done.status == 0
    entries = list(CaptureReader(file))
    assert {entry.dcgm for entry in entries} == {GPU_PAGE.decode()}
    with CaptureWriter(late) as out:  # recorded clocks are those of the entries
        for entry in entries:
            out.write(entry)
    for command in ("replay", "diagnose"):
        document = main(command, late, "--format", "json").documents[-1]
        assert document["signals"]["gpu_sm_clock_hz"] == 1980e6
    down = ("--gpu-metrics", unused_url())
    done = main("record", server.url, file, "--for", "0.5s", "--interval", "0.1s", *down)
    assert done.err.count("continuing without the GPUs' page") == 1
    assert list(CaptureReader(file))[-1].dcgm == ""
    assert main("record", server.url, file, "--gpu-metrics", "nvml").status == 2


@pytest.mark.usefixtures("clock")
def test_a_server_that_is_down(main: Main, tmp_path: Path) -> None:
    url = unused_url()
    file = tmp_path / "down.jsonl.gz"
    done = main("record", url, file, "--for", "0.3s", "--interval", "0.1s")
    assert (done.status, done.out) == (2, "")
    assert "connection refused (recorded; continuing); try: check that vLLM runs" in done.err
    assert done.err.count("connection refused") == 1, "once, not with every scrape"
    entries = list(CaptureReader(file))
    assert {entry.error for entry in entries} == {f"{url}: connection refused"}
    assert f"0 pages, {len(entries)} failed scrapes" in done.err
    replayed = main("replay", file, "--format", "json")
    assert replayed.documents[-1]["causes"][0]["id"] == "target_down"
    assert replayed.status == 1


@pytest.mark.usefixtures("clock")
def test_a_server_that_comes_back(serving: Start, main: Main, tmp_path: Path) -> None:
    pages = bodies("healthy_light", 10, 20)

    def unsteady(sock: socket.socket, _request: bytes, number: int) -> bool:
        ok = answer(pages[number % 10])
        sock.sendall(answer(b"", status="503 Busy") if number in (1, 2) else ok)
        return number not in (1, 2)

    url = serving(unsteady).url
    done = main("record", url, tmp_path / "a.jsonl", "--for", "0.6s", "--interval", "0.1s")
    assert done.status == 0
    messages = done.err.splitlines()
    assert "answered 503 Busy (recorded; continuing)" in messages[1]
    assert messages[2] == "kneewatch: the server answers again"
    assert messages[3].endswith("2 failed scrapes")


@pytest.mark.usefixtures("clock")
def test_a_password_is_in_no_file_and_no_message(
    server: Server, main: Main, tmp_path: Path
) -> None:
    file = tmp_path / "secret.jsonl"
    url = server.url.replace("//", "//me:sesame@")
    done = main("record", url, file, "--for", "0.1s", "--interval", "0.1s")
    assert done.status == 0
    assert "sesame" not in file.read_text() + done.err
    assert b"Authorization: Basic " in server.requests[0]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("notes.txt", "nothing in it can be used"),
        ("folder", "Is a directory"),
        ("no/such/folder.jsonl.gz", "No such file"),
    ],
)
def test_what_cannot_be_recorded_to(
    server: Server, main: Main, tmp_path: Path, file: str, says: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "folder").mkdir()
    done = main("record", server.url, file, "--for", "0.1s")
    assert (done.status, done.out) == (2, "")
    assert says in done.err
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_what_is_no_address(main: Main, tmp_path: Path) -> None:
    done = main("record", "ftp://host", "file.jsonl")
    assert done.status == 2
    assert "the scheme must be http or https" in done.err
    assert not (tmp_path / "file.jsonl").exists()
