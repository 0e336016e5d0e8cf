"""The log of a process on this node: a file, a container's, a unit's journal; whose it may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kneewatch.agent.server import log as places
from kneewatch.agent.server.log import Journal, LogFollower, log_of, log_of_group
from kneewatch.collector.errors import SettingsError
from tests.agent.running import Main, bodies
from tests.agent.server.conftest import Listen
from tests.agent.server.test_process import SERVE
from tests.diagnose.deployment import logs
from tests.waiting import PATIENCE_S

CONTAINER = "0123456789abcdef" * 4
POD = f"0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-{CONTAINER}.scope"


def _path(log: LogFollower | Journal | None) -> str:
    return "" if log is None else log.path


def test_redirected_output_is_the_log(listening: Listen, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    pid, _ = listening("vllm", "serve", "org/model", log=log)
    assert _path(log_of(pid)) == str(log)


def test_a_file_that_was_removed_or_replaced_is_not_read(listening: Listen, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    pid, _ = listening("vllm", "serve", "org/model", log=log)
    log.unlink()
    assert _path(log_of(pid)) != str(log)
    log.write_text("another program's")
    assert _path(log_of(pid)) != str(log)


def test_a_process_without_a_log_of_its_own() -> None:
    assert log_of_group("0::/user.slice/user-0.slice/session-2.scope") is None
    assert log_of(2**22 + 1) is None


@pytest.mark.parametrize(
    ("group", "unit"),
    [
        ("0::/system.slice/vllm.service", "vllm.service"),
        ("0::/system.slice/system-vllm.slice/vllm@70b.service", "vllm@70b.service"),
        ("0::/system.slice/docker.service", ""),
        ("0::/system.slice/ssh.service", ""),
        ("0::/user.slice/user@1000.service/app.slice/x.service", ""),
        ("0::/system.slice/--file=x.service;rm", ""),
    ],
)
def test_the_journal_of_a_unit(group: str, unit: str) -> None:
    assert _path(log_of_group(group)) == (f"journal of {unit}" if unit else "")


def test_the_log_that_the_runtime_keeps_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PODS", tmp_path / "pods")
    monkeypatch.setattr(places, "DOCKER", tmp_path / "docker")
    assert log_of_group(POD) is None
    docker = tmp_path / "docker" / CONTAINER / f"{CONTAINER}-json.log"
    docker.parent.mkdir(parents=True)
    docker.touch()
    assert _path(log_of_group(f"0::/system.slice/docker-{CONTAINER}.scope")) == str(docker)
    pod = tmp_path / "pods" / f"vllm-0_chat_vllm-{CONTAINER}.log"
    pod.parent.mkdir()
    pod.touch()
    assert _path(log_of_group(POD)) == str(pod)


def test_a_file_that_only_another_user_may_read_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(logs.V0_19)
    log.chmod(0o600)
    with pytest.raises(SettingsError, match="unreadable for the server's user"):
        LogFollower(str(log), user_id=os.getuid() + 1).read()
    log.chmod(0o644)
    assert LogFollower(str(log), user_id=os.getuid() + 1).read() > 0


def journalctl(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journalctl that prints a text once, and notes how it was called."""
    monkeypatch.setattr("kneewatch.agent.server.log.JOURNAL_TIMEOUT_S", PATIENCE_S)
    program = folder / "journalctl"
    (folder / "text").write_text(f"{text}-- cursor: s=abc;i=1\n")
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\ncat {folder}/text\n: > {folder}/text\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "calls"


def test_a_journal_is_read_from_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "JOURNAL_EVERY_S", 0.0)
    calls = journalctl(tmp_path, logs.KV_TOO_SMALL, monkeypatch)
    journal = Journal("vllm.service")
    journal.read_rest()
    assert journal.log.failure is not None
    journal.read_rest()
    first, second = calls.read_text().splitlines()
    assert "--lines=20000" in first
    assert "--unit=vllm.service" in first
    assert "--after-cursor=s=abc;i=1" in second


def test_a_journal_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"journal of vllm\.service: FileNotFoundError"):
        Journal("vllm.service").read_rest()


def test_inspect_finds_the_log_without_a_setting(
    listening: Listen, main: Main, tmp_path: Path
) -> None:
    (tmp_path / "page.txt").write_bytes(bodies("kv_pressure_cascade", 40, 60)[0])
    log = tmp_path / "vllm.log"
    log.write_text(logs.V0_32_CPU.replace("65,536", "5,120"))
    _, port = listening("vllm", "serve", "org/model", script=SERVE, log=log)
    shown = main("inspect", f"http://127.0.0.1:{port}", "--server-probe").out
    rows = [line.split()[:2] for line in shown.splitlines()]
    assert ["available_kv_gib", "log"] in rows
    hidden = main("inspect", f"http://127.0.0.1:{port}", "--no-server-probe").out
    assert "available_kv_gib" not in hidden
