"""`kneewatch run` as a process: start, signals, reload, end, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError

import pytest

from kneewatch.agent.daemon.supervisor import OUTDATED
from kneewatch.agent.store.reader import Reader
from tests.agent.daemon.running import Daemon
from tests.agent.running import ARGV, Main, bodies, environment, in_turn, run
from tests.agent.store.factories import EVER
from tests.collector.servers import Start
from tests.waiting import PATIENCE_S, until

HEALTHY = bodies("healthy_light", 10, 30)
QUICK = ("--interval", "0.2s", "--gpu-metrics", "none")
WINDOW_S = 3600
"""Longer than a test takes."""


def never(_sock: socket.socket, _request: bytes, _number: int) -> bool:
    """Answers nothing, as long as the connection is there."""
    _sock.recv(1)
    return False


def test_a_reload_that_is_asked_for_during_the_start_is_done_after_it(tmp_path: Path) -> None:
    settings, log = tmp_path / "k.toml", tmp_path / "log"
    settings.write_text('gpu_metrics = "none"\n[[targets]]\nurl = "http://127.0.0.1:9"\n')
    script = Path(sys.executable).with_name("kneewatch")
    own = ("--config", settings, "--listen", "127.0.0.1:0", "--store", tmp_path / "k.db")
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [script, "run", *own], env=environment(), stdout=subprocess.DEVNULL, stderr=stderr
        ) as process,
    ):
        status = Path(f"/proc/{process.pid}/status")
        hup = 1 << (signal.SIGHUP - 1)
        until(lambda: int(status.read_text().partition("SigBlk:")[2].split()[0], 16) & hup)
        process.send_signal(signal.SIGHUP)
        until(lambda: "settings reloaded" in log.read_text() or process.poll() is not None)
        assert process.poll() is None
        process.terminate()


def test_it_watches_answers_and_ends(serving: Start, tmp_path: Path) -> None:
    first, second = (serving(in_turn(HEALTHY)) for _ in range(2))
    with Daemon(tmp_path, first.url, f"127.0.0.1:{second.port}", *QUICK) as daemon:
        names = {f"http://127.0.0.1:{server.port}" for server in (first, second)}
        until(lambda: daemon.diagnoses().keys() == names)
        until(lambda: {diagnosis["health"] for diagnosis in daemon.diagnoses().values()} == {"ok"})
        daemon.wait_for("ready")
        daemon.end(signal.SIGINT)
    assert (tmp_path / "kneewatch.db").stat().st_size > 0
    assert [line["targets"] for line in daemon.said("watching targets")] == ["2"]
    assert first.connections == 1, "one connection, one GET a scrape"
    assert "Traceback" not in daemon.log


def test_it_ends_in_time_while_targets_hang(serving: Start, tmp_path: Path) -> None:
    hanging = [serving(never) for _ in range(8)]
    healthy = serving(in_turn(HEALTHY))
    urls = [server.url for server in (*hanging, healthy)]
    with Daemon(tmp_path, *urls, *QUICK, "--fetch-read-timeout", "1h") as daemon:
        until(lambda: all(server.requests for server in (*hanging, healthy)))
        until(lambda: len(healthy.requests) > 5)
        daemon.end()
    assert "Traceback" not in daemon.log
    assert "maximum number of running instances" not in daemon.log


def seen_s(daemon: Daemon, name: str) -> float:
    """What a target's window holds; after one scrape it is all that it could hold."""
    return float(daemon.diagnoses()[name]["window_s"])


def test_reload_without_losing_a_window(serving: Start, tmp_path: Path) -> None:
    kept, added, gone = (serving(in_turn(HEALTHY)) for _ in range(3))
    config = tmp_path / "k.toml"

    def write(*tables: str) -> None:
        text = "".join(f"[[targets]]\n{table}\n" for table in tables)
        config.write_text(f"window_s = {WINDOW_S}\n{text}")

    write(f'url = "{kept.url}"\nname = "kept"', f'url = "{gone.url}"\nname = "gone"')
    with Daemon(tmp_path, "--config", config, *QUICK) as daemon:
        until(lambda: daemon.diagnoses().keys() == {"kept", "gone"})
        until(lambda: 1.5 < seen_s(daemon, "kept") < WINDOW_S)
        write(
            f'url = "{kept.url}"\nname = "kept"\nlabels.tier = "chat"',
            f'url = "{added.url}"\nname = "added"',
        )
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("settings reloaded")
        until(lambda: daemon.diagnoses().keys() == {"kept", "added"})
        assert 1.5 < seen_s(daemon, "kept") < WINDOW_S
        until(lambda: daemon.diagnoses()["kept"]["tier"] == "chat")
        until(lambda: seen_s(daemon, "added") < seen_s(daemon, "kept"))

        config.write_text("windows_s = 3\n")
        daemon.process.send_signal(signal.SIGHUP)
        (line,) = daemon.wait_for("reload failed, keeping the old settings")
        assert "unknown setting 'windows_s'; did you mean window_s?" in line["error"]
        write(f'url = "{kept.url}"\nname = "kept"\nmodel = "no-such-model"')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("reload failed, keeping the old settings", 2)
        write(f'url = "{kept.url}"', f'url = "{kept.url}"')
        daemon.process.send_signal(signal.SIGHUP)
        line = daemon.wait_for("reload failed, keeping the old settings", 3)[-1]
        assert re.search(r"\[\[targets\]\] number 1 and .*\[\[targets\]\] number 2", line["error"])
        before = len(kept.requests)
        until(lambda: len(kept.requests) > before + 2)
        assert daemon.diagnoses().keys() == {"kept", "added"}
        asked = len(gone.requests)

        config.write_text(
            f'store.keep_s = 86400\n[[targets]]\nurl = "{kept.url}"\nname = "kept"\nwindow_s = 5\n'
        )
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("settings reloaded", 2)
        until(lambda: seen_s(daemon, "kept") <= 5)
        assert json.loads(daemon.get("/readyz"))["restart_needed"] == ["store.keep_s"]
        daemon.end()
    assert len(gone.requests) == asked
    assert kept.connections == 2, "one until it was judged by something else"


def test_files_are_followed(serving: Start, tmp_path: Path) -> None:
    first, second = (serving(in_turn(HEALTHY)) for _ in range(2))
    file = tmp_path / "targets.json"

    def write(*urls: str) -> None:
        new = tmp_path / "new"
        new.write_text(json.dumps([{"targets": urls, "labels": {"tier": "chat"}}]))
        new.rename(file)

    names = [f"http://127.0.0.1:{server.port}" for server in (first, second)]
    config = tmp_path / "k.toml"
    config.touch()
    args = ("--file-sd", f"{tmp_path}/*.json", "--config", config)
    with Daemon(tmp_path, *args, *QUICK) as daemon:
        daemon.wait_for("ready")
        assert daemon.diagnoses() == {}
        write(first.url)
        until(lambda: list(daemon.diagnoses()) == names[:1])
        assert daemon.diagnoses()[names[0]]["tier"] == "chat"
        write(first.url, second.url)
        until(lambda: sorted(daemon.diagnoses()) == sorted(names))
        file.write_text("[")
        daemon.wait_for("file_sd: invalid file, keeping its previous targets")
        before = len(first.requests)
        until(lambda: len(first.requests) > before + 2)
        assert sorted(daemon.diagnoses()) == sorted(names)
        config.write_text('[[targets]]\nurl = "no-such.jsonl.gz"\n')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("reload failed, keeping the old settings")
        write(second.url)  # files are followed as before
        until(lambda: list(daemon.diagnoses()) == names[1:])
        file.unlink()
        until(lambda: daemon.diagnoses() == {})
        daemon.end()
    assert second.connections == 1


def test_a_target_may_have_the_name_of_a_job(serving: Start, tmp_path: Path) -> None:
    config, server = tmp_path / "k.toml", serving(in_turn(HEALTHY))
    config.write_text(f'[[targets]]\nurl = "{server.url}"\nname = "fleet"\n')
    own = ("--config", config, "--prometheus", "http://127.0.0.1:9")
    with Daemon(tmp_path, *own, *QUICK) as daemon:
        until(lambda: "fleet" in daemon.diagnoses())
        daemon.wait_for("metrics system does not answer")
        before = len(server.requests)
        until(lambda: len(server.requests) > before + 2)
        daemon.end()


def test_systemd_is_told(serving: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_S)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"}
        heard: list[str] = []

        def hear(wanted: str) -> None:
            while not heard or wanted not in heard[-1]:
                heard.append(sock.recv(4096).decode())

        with Daemon(tmp_path, serving(in_turn(HEALTHY)).url, *QUICK, env=env) as daemon:
            hear("READY=1")
            assert re.fullmatch(
                r"READY=1\nSTATUS=[01] of 1 targets up; http://\S+/triage", heard[-1]
            )
            hear("WATCHDOG=1")
            daemon.process.send_signal(signal.SIGHUP)
            hear("RELOADING=1\nMONOTONIC_USEC=")
            moment_s = int(heard[-1].partition("USEC=")[2]) / 1e6
            assert abs(moment_s - time.monotonic()) < PATIENCE_S
            hear("READY=1")
            daemon.process.send_signal(signal.SIGTERM)
            hear("STOPPING=1")
            assert daemon.process.wait(PATIENCE_S) == 0


def test_captures_are_played_and_the_demo_leaves_nothing(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    with Daemon(tmp_path, "--demo", store=False, env=env) as daemon:
        until(lambda: "demo" in daemon.diagnoses())
        assert len(list(tmp_path.glob("kneewatch-demo-*/kneewatch.db"))) == 1
        verdict = daemon.diagnoses()["demo"]
        assert abs(verdict["t"] - time.time()) < 3600, "as if it were now"
        until(lambda: daemon.diagnoses()["demo"]["t"] > verdict["t"])
        daemon.end()
    assert not list(tmp_path.glob("kneewatch-demo-*"))
    assert not (tmp_path / "state").exists()


def test_the_demo_says_when_it_turns_critical_and_that_its_history_goes(tmp_path: Path) -> None:
    demo = ("run", "--demo", "--listen", "127.0.0.1:0", "--for", "100ms")
    ended = run(*demo, cwd=tmp_path)
    assert ended.status == 0
    history, *said = ended.out.splitlines()[-3:]
    assert said == [
        "demo     healthy at first, critical after 80 s (--for 0.1s ends before that)",
        "         its history is deleted at exit (--store FILE keeps it); until then: "
        f"kneewatch report --store {history.split()[-1]}",
    ]
    refused = run("report", "--store", "none.db", cwd=tmp_path)
    assert "--store FILE reads another. The demo has its own" in refused.err
    ended = run(*demo, "--store", str(tmp_path / "k.db"), cwd=tmp_path)
    assert "deleted" not in ended.out
    assert (tmp_path / "k.db").exists()


def test_hostile_pages_make_no_lines_in_the_log(serving: Start, tmp_path: Path) -> None:
    evil = b'ti\\nny\x1b[2J\\" level=error msg=\\"all is well'
    pages = [
        page.replace(b'"tiny"', b'"' + evil + b'"')
        for page in bodies("kv_pressure_cascade", 40, 60)
    ]
    url = serving(in_turn(pages)).url
    with Daemon(tmp_path, url, *QUICK, "--window", "15s", "--log-format", "logfmt") as daemon:
        until(lambda: daemon.said("stage changed"))
        daemon.end()
    assert all(line.isprintable() for line in daemon.log.splitlines())
    assert not daemon.said("all is well")
    assert daemon.said("stage changed")[0]["model"].startswith("ti\\nny\\u001b")


def test_json_logs_and_the_history_in_the_state_folder_and_no_secret_anywhere(
    serving: Start, tmp_path: Path
) -> None:
    server = serving(in_turn(HEALTHY))
    url = server.url.replace("//", "//me:sesame@") + "?api_key=sesame"
    env = {"XDG_STATE_HOME": str(tmp_path / "state"), "KNEEWATCH_LOG_FORMAT": "json"}
    messages = {"watching targets", "listening", "ready", "target up"}
    pages = ("/metrics", "/triage", "/api/v1/triage", "/readyz")
    with Daemon(tmp_path, url, *QUICK, store=False, env=env) as daemon:
        until(lambda: all(f'"{message}"' in daemon.log for message in messages))
        answers = [daemon.get(page) for page in pages]
        assert server.url.partition("//")[2].partition("/")[0] in answers[2], "it is shown there"
        daemon.end()
        out = daemon.printed()
    assert b"GET /metrics?api_key=sesame " in server.requests[0]
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert messages <= {line["msg"] for line in lines}
    folder = tmp_path / "state" / "kneewatch"
    config = tmp_path / "k.toml"
    config.write_text(f'[[targets]]\nurl = "{url}"\n')
    shown = run("config", "--config", str(config), cwd=tmp_path).out
    assert "api_key=" in shown
    files = [file.read_bytes().decode("latin-1") for file in folder.iterdir() if file.is_file()]
    assert not [text for text in (daemon.log, out, shown, *answers, *files) if "sesame" in text]
    assert f"history  {folder}/kneewatch.db" in out
    assert (folder / "kneewatch.db").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("quiet")
def test_a_port_that_is_taken(main: Main, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = main("run", "a:1", "--listen", listen, "--store", tmp_path / "k.db")
    assert (ended.status, ended.out) == (2, "")
    assert f"kneewatch: flag --listen: listen = '{listen}': Address already in use" in ended.err
    assert "Traceback" not in ended.err


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "no target": ((), "no target to watch: pass one (kneewatch run http://host:8000)"),
    "no such capture": (("no-such.jsonl.gz",), "no-such.jsonl.gz: no such file"),
    "no address": (("ftp://a",), "argument 1: not a target: 'ftp://a': the scheme must be http"),
    "twice": (("a:1", "b:1", "http://a:1/metrics"), "'http://a:1': argument 1 and argument 3"),
    "demo and target": (("--demo", "a:1"), "--demo plays its own recording"),
    "open to all": (("a:1", "--listen", "0.0.0.0:0"), "is reachable from other machines"),
    "no listen": (("a:1", "--listen", "here"), "'here' is not HOST:PORT"),
    "interval": (("a:1", "--interval", "1ms"), "interval_s = 0.001 is too short"),
    "model": (("a:1", "--gpu", "h1000"), "flag --gpu: "),
    "store": (("a:1", "--store", "/proc/no/k.db"), "/proc/no/k.db"),
    "level": (("a:1", "--log-level", "loud"), "log.level must be one of debug, info"),
    "token": (("a:1", "--http-token-file", "no-such"), "no-such"),
}


@pytest.fixture
def quiet() -> Iterator[None]:
    """What `run` does to the log is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(main: Main, tmp_path: Path, kind: str) -> None:
    args, says = REFUSED[kind]
    ended = main("run", "--listen", "127.0.0.1:0", "--store", tmp_path / "k.db", *args)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("kneewatch: ")
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_a_second_signal_ends_it_at_once(serving: Start, tmp_path: Path) -> None:
    with Daemon(tmp_path, serving(never).url, *QUICK) as daemon:
        assert daemon.url
        os.kill(daemon.process.pid, signal.SIGSTOP)
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.kill(daemon.process.pid, number)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)


def test_hostile_files_stop_neither_the_daemon_nor_its_end(serving: Start, tmp_path: Path) -> None:
    server = serving(in_turn(HEALTHY))
    folder, config = tmp_path / "targets", tmp_path / "k.toml"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([{"targets": [server.url]}]))
    config.write_text(f'file_sd = ["{folder}/*.json"]\n')
    os.mkfifo(folder / "pipe.json")
    (folder / "zeros.json").symlink_to("/dev/zero")
    with Daemon(tmp_path, "--config", config, *QUICK) as daemon:
        until(lambda: len(daemon.diagnoses()) == 1)
        failed = "reload failed, keeping the old settings"
        texts = [f"window_s = {'9' * 4400}", f"a{'.a' * 5000} = 1", f"window_s = 0x{'f' * 4000}"]
        for times, text in enumerate(texts, 1):
            config.write_text(f"{text}\n")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for(failed, times)
        config.unlink()
        os.mkfifo(config)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for(failed, len(texts) + 1)
        daemon.wait_for("file_sd: invalid file, keeping its previous targets", 2)
        before = len(server.requests)
        until(lambda: len(server.requests) > before + 2)
        with pytest.raises(HTTPError) as caught:
            daemon.get("/readyz?strict=true")
        reasons = caught.value.read().decode()
        assert "not a regular file" in reasons
        assert OUTDATED in reasons
        config.unlink()
        config.write_text(f'file_sd = ["{folder}/*.json"]\n')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("settings reloaded")
        with pytest.raises(HTTPError) as caught:
            daemon.get("/readyz?strict=true")
        assert OUTDATED not in caught.value.read().decode()
        assert daemon.end() < 3.0
    assert "Traceback" not in daemon.log


def test_a_full_disk_behind_stdout_does_not_stop_it(tmp_path: Path) -> None:
    argv = [*ARGV, "run", "--demo", "--for", "0.1s", "--listen", "127.0.0.1:0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            argv, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 0
    assert b"cannot write to stdout" in done.stderr


STANDING = """
import time
runs = time.time
def stands():
    try:
        with open({file!r}) as file:
            return float(file.read())
    except OSError:
        return runs()
time.time = stands
"""


def test_a_clock_that_stands_still_leaves_no_verdict_as_it_was(
    serving: Start, tmp_path: Path
) -> None:
    server, file = serving(in_turn(HEALTHY)), tmp_path / "stands"
    (tmp_path / "sitecustomize.py").write_text(STANDING.format(file=str(file)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Daemon(tmp_path, server.url, *QUICK, env={"PYTHONPATH": path}) as daemon:
        daemon.wait_for("ready")
        file.write_text(str(time.time()))
        daemon.wait_for("the system clock stands still; times go on by the monotonic clock")

        def newest_s() -> float:
            return float(next(iter(daemon.diagnoses().values()))["t"])

        since_s = newest_s()
        until(lambda: newest_s() > since_s + 1.0)
        with pytest.raises(HTTPError) as caught:
            daemon.get("/readyz?strict=true")
        assert "the system clock stands still" in caught.value.read().decode()
        file.unlink()
        until(lambda: '"reasons":[]' in daemon.get("/readyz"))
        daemon.end()


def test_a_shared_memory_file_that_is_cut_ends_the_daemon_and_costs_nothing(
    serving: Start, tmp_path: Path
) -> None:
    server, store = serving(in_turn(HEALTHY)), tmp_path / "kneewatch.db"
    with Daemon(tmp_path, server.url, *QUICK) as daemon:
        daemon.wait_for("ready")
        until(lambda: Path(f"{store}-wal").stat().st_size > 100_000)
        os.truncate(f"{store}-shm", 0)
        assert daemon.process.wait(PATIENCE_S) == -signal.SIGBUS
    with closing(Reader(store)) as reader:
        times = reader.scrapes(f"http://127.0.0.1:{server.port}", **EVER).times
    assert len(server.requests) - 2 <= len(times) <= len(server.requests)


def test_a_history_that_cannot_be_written_shows_in_the_exit_status(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--demo", "--interval", "0.1s") as daemon:
        _, pid = daemon.url, daemon.process.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        daemon.wait_for("store cannot write")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_S) == 2
        assert daemon.wait_for("store closed with unwritten cycles")[0]["level"] == "error"


def test_without_file_descriptors_the_log_stays_short_and_targets_stay(
    serving: Start, tmp_path: Path
) -> None:
    folder, server = tmp_path / "targets", serving(in_turn(HEALTHY))
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([{"targets": [server.url]}]))
    with Daemon(tmp_path, "--file-sd", f"{folder}/*.json", *QUICK, store=False) as daemon:
        daemon.wait_for("ready")
        port, pid = int(daemon.url.rpartition(":")[2]), daemon.process.pid
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 4, before[1]))
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        (line,) = daemon.wait_for("http: connection failed")
        until(lambda: f"cannot list {folder}" in daemon.log)
        assert len(daemon.log) < 20_000, line
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for connection in opened:
            connection.close()
        assert len(daemon.diagnoses()) == 1
        asked = len(server.requests)
        until(lambda: len(server.requests) > asked + 2)
        daemon.end()
    assert [line["targets"] for line in daemon.said("watching targets")] == ["1"]
