"""Settings that were read again: what goes into force, and that the rest is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kneewatch.agent.daemon import supervisor as process
from kneewatch.agent.daemon.cycle import Sinks
from kneewatch.agent.daemon.discovery import Discovery
from kneewatch.agent.daemon.periodic_jobs import DueQueue
from kneewatch.agent.daemon.supervisor import Reload, Supervisor, TargetJobs
from kneewatch.agent.fleet.watch import FleetWatch
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.report.schedule import NEVER_S, ReportJob
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.target_state import Board
from kneewatch.collector.errors import SettingsError
from tests.waiting import PATIENCE_S, until

MONDAY, TUESDAY = '[report]\ncron = "0 6 * * mon"\n', '[report]\ncron = "0 6 * * tue"\n'
RECEIVER = '[[notify]]\nkind = "webhook"\nurl = "http://127.0.0.1:9/"\nname = "oncall"\n'
Made = Callable[[str], Settings]


@pytest.fixture
def settings_with(tmp_path: Path) -> Made:
    def settings(text: str) -> Settings:
        file = tmp_path / "kneewatch.toml"
        file.write_text(text)
        return load(file=file, environ={}, flags={})

    return settings


@pytest.fixture
def notifier() -> Iterator[Notifier]:
    notifier = Notifier([], state_file=None)
    yield notifier
    notifier.close(0.5)


@pytest.fixture
def reports(settings_with: Made, tmp_path: Path) -> ReportJob:
    return ReportJob(settings_with(MONDAY), tmp_path / "k.db")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is done to the log is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def taking_up(settings_with: Made, notifier: Notifier, reports: ReportJob) -> Reload:
    return Reload(settings_with(MONDAY), reports=reports, notifier=notifier)


def test_what_needs_a_restart_is_told_until_it_is_taken_back(
    taking_up: Reload, settings_with: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    taking_up(settings_with('listen = "127.0.0.1:9999"\nstore.keep_s = 86400\n' + MONDAY))
    assert taking_up.restart_needed == ("listen", "store.keep_s")
    assert '"setting needs a restart to take effect" key=listen' in capfd.readouterr().err
    taking_up(settings_with("window_s = 30\n" + MONDAY))
    assert not taking_up.restart_needed


def test_reports_are_planned_anew(
    taking_up: Reload, settings_with: Made, reports: ReportJob
) -> None:
    monday = reports.due_s
    taking_up(settings_with(TUESDAY))
    assert reports.due_s not in (NEVER_S, monday)
    tuesday = reports.due_s
    assert taking_up(settings_with('[report]\ncron = "0 0 30 2 *"\n')) == ["report"]
    assert reports.due_s == tuesday, "what is wrong changes nothing"
    taking_up(settings_with(""))
    assert reports.due_s == NEVER_S
    taking_up(settings_with(MONDAY))
    assert reports.due_s == monday


def test_receivers_are_taken_up_and_wrong_ones_change_nothing(
    taking_up: Reload, settings_with: Made, notifier: Notifier, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not taking_up(settings_with(RECEIVER))
    assert list(notifier.stats_by_receiver()) == ["oncall"]
    assert taking_up(settings_with(RECEIVER + 'severity = "purple"\n')) == ["notify"]
    assert list(notifier.stats_by_receiver()) == ["oncall"]
    log = capfd.readouterr().err
    assert 'level=error msg="reload failed, keeping the old settings" part=notify error=' in log


class SetLate(threading.Event):
    """An event that is set just after the first wait for it has ended without it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            self.set()
            return False
        return super().wait(PATIENCE_S if timeout is None else timeout)


def test_no_signal_to_reload_is_lost(settings_with: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "Event", SetLate)
    settings, cycles, board, reads = settings_with(""), DueQueue(), Board(), list[None]()

    def read() -> Settings:
        reads.append(None)
        raise SettingsError("no")

    supervisor = Supervisor(
        cycles=cycles,
        jobs=TargetJobs(cycles, Sinks(board)),
        discovery=Discovery(["a:1"], settings),
        board=board,
        systemd="",
        read_settings=read,
        apply_settings=lambda _settings: (),
        address="",
    )
    supervisor.run(0.01)
    until(lambda: bool(reads))
    until(lambda: any("reload failed" in problem for problem in supervisor.problems()))


def test_a_fleet_without_an_answer_is_said_when_ready(
    settings_with: Made, caplog: pytest.LogCaptureFixture
) -> None:
    settings, cycles, board = settings_with(""), DueQueue(), Board()
    watch = FleetWatch("http://127.0.0.1:1", settings, "")
    supervisor = Supervisor(
        cycles=cycles,
        jobs=TargetJobs(cycles, Sinks(board)),
        discovery=Discovery([], settings, may_be_empty=True),
        board=board,
        systemd="",
        read_settings=lambda: settings,
        apply_settings=lambda _settings: (),
        address="",
        fleet_watch=watch,
    )
    caplog.set_level("INFO")
    supervisor.run(0.01)
    assert "ready targets=0" not in caplog.text, "the first query still runs"
    watch.cycle()
    supervisor.run(0.01)
    assert "ready targets=0" in caplog.text
    assert "the fleet's state is unknown: no answer since the start at " in caplog.text
