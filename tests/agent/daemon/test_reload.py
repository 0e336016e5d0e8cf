"""Settings that were read again: what goes into force, and that the rest is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kneewatch.agent.daemon.periodic_jobs import DueQueue, Job, Times
from kneewatch.agent.daemon.supervisor import Reload
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.settings.effective import Settings, load

MONDAY, TUESDAY = '[report]\ncron = "0 6 * * mon"\n', '[report]\ncron = "0 6 * * tue"\n'
RECEIVER = '[[notify]]\nkind = "webhook"\nurl = "http://127.0.0.1:9/"\nname = "oncall"\n'
Made = Callable[[str], Settings]


class Plan(DueQueue):
    """A queue that notes the times of its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, str] = {}

    def put_at(self, name: str, job: Job, times: Times, first_s: float | None = None) -> None:
        super().put_at(name, job, times, first_s)
        self.times[name] = str(times)

    def drop(self, name: str) -> None:
        super().drop(name)
        self.times.pop(name, None)


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


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is done to the log is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def taking_up(settings_with: Made, notifier: Notifier, plan: Plan, tmp_path: Path) -> Reload:
    return Reload(
        settings_with(MONDAY), queue=plan, store_file=tmp_path / "k.db", notifier=notifier
    )


def test_what_needs_a_restart_is_told_until_it_is_taken_back(
    taking_up: Reload, settings_with: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    taking_up(settings_with('listen = "127.0.0.1:9999"\nstore.keep_s = 86400\n' + MONDAY))
    assert taking_up.restart_needed == ("listen", "store.keep_s")
    assert '"setting needs a restart to take effect" key=listen' in capfd.readouterr().err
    taking_up(settings_with("window_s = 30\n" + MONDAY))
    assert not taking_up.restart_needed


def test_reports_are_planned_anew(taking_up: Reload, settings_with: Made, plan: Plan) -> None:
    (monday,) = plan.times.values()
    taking_up(settings_with(TUESDAY))
    (tuesday,) = plan.times.values()
    assert tuesday != monday
    taking_up(settings_with(""))
    assert not plan.times
    taking_up(settings_with(MONDAY))
    assert list(plan.times.values()) == [monday]


def test_receivers_are_taken_up_and_wrong_ones_change_nothing(
    taking_up: Reload, settings_with: Made, notifier: Notifier, capfd: pytest.CaptureFixture[str]
) -> None:
    taking_up(settings_with(RECEIVER))
    assert list(notifier.stats_by_receiver()) == ["oncall"]
    taking_up(settings_with(RECEIVER + 'severity = "purple"\n'))
    assert list(notifier.stats_by_receiver()) == ["oncall"]
    log = capfd.readouterr().err
    assert 'level=error msg="reload failed, keeping the old settings" part=notify error=' in log
