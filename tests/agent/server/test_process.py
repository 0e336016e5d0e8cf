"""The process behind a port on this node: real child processes, read through psutil."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent.server.process import FileError, place, read_process, read_yaml
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.diagnose.deployment.server_facts import SourceReading
from tests.agent.running import Main, bodies
from tests.agent.server.conftest import LISTEN, Listen
from tests.agent.server.test_model_file import model_folder

SERVE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/metrics"
        body = Path("page.txt").read_bytes() if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", 0), Page)
print(server.server_port, flush=True)
import threading
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""
SECRETS = {"VLLM_API_KEY": "hunter2", "HF_TOKEN": "hunter2", "VLLM_HF_TOKEN": "hunter2"}


def read(port: int, host: str = "127.0.0.1") -> SourceReading:
    return read_process(f"http://{host}:{port}/metrics", 5.0)[0]


def test_a_server_shows_its_command_line_and_variables(listening: Listen) -> None:
    env = {"VLLM_USE_V1": "1", "CUDA_VISIBLE_DEVICES": "0,1", **SECRETS}
    pid, port = listening("vllm", "serve", "org/model", "-tp", "2", "--api-key=hunter2", **env)
    reading = read(port)
    assert (reading.source, reading.read_s, reading.notes) == ("process", 5.0, ())
    assert reading.command_line is not None
    assert (reading.command_line.model, reading.command_line.complete) == ("org/model", True)
    assert reading.command_line.flags["--tensor-parallel-size"] == "2"
    values = dict(reading.values)
    assert (values["pid"], values["VLLM_USE_V1"]) == (pid, "1")
    assert values["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "hunter2" not in repr(values)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "0.0.0.0"])
def test_a_server_is_found_by_each_name_of_this_node(listening: Listen, host: str) -> None:
    _, port = listening("vllm", "serve", "org/model")
    assert read(port, host).command_line is not None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("nginx.py", ("vllm", "serve", "/etc")), ("vllm", ("bench", "serve")), ("serve", ())],
)
def test_another_program_on_the_port_is_a_note(
    listening: Listen, name: str, arguments: tuple[str, ...]
) -> None:
    pid, port = listening(name, *arguments)
    reading = read(port)
    assert (reading.command_line, dict(reading.values)) == (None, {})
    (note,) = reading.notes
    assert f"pid {pid}" in note
    assert "not vLLM" in note


def test_a_worker_that_holds_the_port_has_its_parents_command_line(listening: Listen) -> None:
    worker = f"{LISTEN!r}, 'multiprocessing.spawn'"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {worker}])\n"
    pid, port = listening("vllm", "serve", "org/model", script=parent)
    assert read(port).values["pid"] == pid


@pytest.mark.parametrize("address", ["http://192.0.2.1:8000", "http://vllm.example:8000"])
def test_a_remote_server_has_no_process_here(address: str) -> None:
    assert read_process(address, 5.0) == (SourceReading("process", 5.0), None)


def test_a_port_without_a_listener_has_no_facts() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert read(bound.getsockname()[1]) == SourceReading("process", 5.0)


def test_a_configuration_file_of_the_command_line(listening: Listen, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("tensor-parallel-size: 4\nmax-num-seqs: 64\n")
    arguments = ("serve", "org/model", "--config", "serve.yaml", "--max-num-seqs", "8")
    _, port = listening("vllm", *arguments)
    launch = read(port).command_line
    assert launch is not None
    assert launch.complete
    assert launch.count("--tensor-parallel-size") == 4
    assert launch.count("--max-num-seqs") == 8, "the command line wins"


ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 20)
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("secret.txt", "model: hunter2"),
        ("big.yaml", "a: hunter2\n" + "# hunter2\n" * 10_000),
        ("aliases.yaml", ALIASES),
        ("list.yaml", "[hunter2]"),
        ("broken.yaml", "hunter2: [\x00"),
        ("tag.yaml", 'hunter2: !!int ""'),
        ("missing.yaml", None),
    ],
)
def test_a_file_that_is_no_configuration_is_a_note(
    listening: Listen, tmp_path: Path, name: str, text: str | None
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    _, port = listening("vllm", "serve", "org/model", "--config", name)
    reading = read(port)
    assert reading.command_line is not None
    assert not reading.command_line.complete
    (note,) = reading.notes
    assert note.startswith("--config: ")
    assert "hunter2" not in note


def test_a_pipe_is_not_waited_for(listening: Listen, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    _, port = listening("vllm", "serve", "org/model", "--config", "pipe.yaml")
    assert "not a regular file" in read(port).notes[0]


STRANGER = 12345
"""A user without a name, whose only rights are those of everyone."""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everyone may enter, unlike those of `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "is_read"),
    [(0o644, 0o755, True), (0o640, 0o755, False), (0o644, 0o700, False), (0o644, 0o744, False)],
)
def test_a_file_that_the_servers_user_may_not_read_is_not_read_for_it(
    public: Path, file_mode: int, folder_mode: int, *, is_read: bool
) -> None:
    folder = public / "private"
    folder.mkdir()
    file = folder / "serve.yaml"
    file.write_text("model: org/model\n")
    link = public / "link.yaml"
    link.symlink_to(file)
    file.chmod(file_mode)
    folder.chmod(folder_mode)
    for path in (file, link):
        assert read_yaml(path, user_id=0) == {"model": "org/model"}, "root may"
        assert read_yaml(path, user_id=os.getuid()) == {"model": "org/model"}
        if is_read:
            assert read_yaml(path, user_id=STRANGER) == {"model": "org/model"}
            continue
        with pytest.raises(FileError, match="not readable by the server's user"):
            read_yaml(path, user_id=STRANGER)


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/vllm.service\n", {"unit": "vllm.service"}),
        (f"0::/system.slice/docker-{'ab' * 32}.scope", {"container": "abababababab"}),
        (f"0::/kubepods/pod1/{'cd' * 32}\n", {"container": "cdcdcdcdcdcd"}),
        ("0::/user.slice\n", {}),
        ("", {}),
    ],
)
def test_where_a_process_runs(cgroup: str, expected: dict[str, str]) -> None:
    assert place(cgroup) == expected


def test_the_host_of_a_local_server_is_recorded_and_replayed(
    listening: Listen, main: Main, tmp_path: Path
) -> None:
    (tmp_path / "page.txt").write_bytes(bodies("healthy_light", 10, 11)[0])
    _, port = listening("vllm", "serve", str(model_folder(tmp_path / "mine")), script=SERVE)
    file = tmp_path / "a.jsonl"
    watched = ("--for", "0.3s", "--interval", "0.1s")
    assert main("record", f"127.0.0.1:{port}", file, "--server-probe", *watched).status == 0
    first, *others = CaptureReader(file)
    assert all(0 <= entry.host["host_cpu_steal_ratio"] <= 1 for entry in others)
    assert "host_cpu_steal_ratio" not in first.host, "a share of time needs two readings"
    *_, last = main("replay", file, "--format", "json").documents
    assert last["signals"]["host_cpu_steal_ratio"] == pytest.approx(
        others[-1].host["host_cpu_steal_ratio"], abs=1e-3
    )
    other = tmp_path / "b.jsonl"
    assert main("record", f"127.0.0.1:{port}", other, *watched).status == 0
    assert [dict(entry.host) for entry in CaptureReader(other) if entry.host] == []


def test_a_local_server_is_known_without_a_setting(
    listening: Listen, main: Main, tmp_path: Path
) -> None:
    (tmp_path / "page.txt").write_bytes(bodies("healthy_light", 10, 11)[0])
    folder = model_folder(tmp_path / "mine")
    _, port = listening("vllm", "serve", str(folder), "--max-num-seqs", "64", script=SERVE)
    ended = main("inspect", f"127.0.0.1:{port}", "--server-probe", "--format", "json")
    document = json.loads(ended.out)
    sources = {fact["name"]: (fact["source"], fact["value"]) for fact in document["facts"]}
    assert sources["model"] == ("config.json", str(folder))
    assert sources["tensor_parallel"] == ("process", 1)
    assert sources["max_num_seqs"] == ("process", 64)
    assert {row["name"] for row in document["unknown"]} == {"gpu", "replicas", "vllm_version"}
