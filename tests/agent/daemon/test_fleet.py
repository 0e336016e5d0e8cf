"""Many targets at once: nobody delays another, and what changes keeps what did not."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kneewatch.agent.daemon import supervisor as process
from kneewatch.agent.daemon.discovery import Discovery, target_profile
from kneewatch.agent.daemon.periodic_jobs import DueQueue, Job, RunTimes, first_run_s, phase_ratio
from kneewatch.agent.daemon.supervisor import TargetJobs
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CaptureError, SettingsError
from kneewatch.diagnose.diagnosis_config import Profile
from tests.agent.daemon.factories import Kept, settings, target
from tests.agent.running import bodies, in_turn
from tests.collector.servers import Start
from tests.waiting import until

HEALTHY = bodies("healthy_light", 10, 30)
INTERVAL_S = 0.5


class Fleeting:
    """A fleet with its clockwork."""

    def __init__(self) -> None:
        self.kept, self.clockwork, self.told = Kept(), DueQueue(), list[list[str]]()
        self.fleet = TargetJobs(
            self.clockwork,
            self.kept.sinks(),
            on_targets=lambda specs: self.told.append([spec.name for spec in specs]),
        )
        self.clockwork.start()

    def apply(self, specs: Sequence[TargetSpec]) -> None:
        self.fleet.apply(specs)

    def times(self, name: str) -> list[float]:
        return [cycle.t_s for cycle in list(self.kept.cycles) if cycle.target == name]

    def close(self) -> None:
        self.apply([])
        self.clockwork.stop()
        until(lambda: self.clockwork.busy == 0)


@pytest.fixture
def fleeting() -> Iterator[Fleeting]:
    daemons = Fleeting()
    yield daemons
    daemons.close()


def quick(url: str, **values: Any) -> TargetSpec:  # noqa: ANN401
    return target(url, **{"interval_s": INTERVAL_S, **values})


def test_half_of_twenty_targets_hang(serving: Start, fleeting: Fleeting) -> None:
    healed = threading.Event()
    page = in_turn(HEALTHY)

    def hangs(sock: socket.socket, request: bytes, number: int) -> bool | None:
        if healed.is_set():
            return page(sock, request, number)
        sock.recv(1)
        return False

    healthy = [quick(serving(in_turn(HEALTHY)).url) for _ in range(10)]
    hanging = [quick(serving(hangs).url, fetch__read_timeout_s=0.8) for _ in range(10)]
    fleeting.apply([*healthy, *hanging])
    until(lambda: fleeting.fleet.all_scraped)
    until(lambda: all(len(fleeting.times(spec.name)) >= 12 for spec in healthy))
    most = max(len(fleeting.times(spec.name)) for spec in hanging)
    assert most < 12, "a target that hangs is asked less often, and holds up no other"
    for spec in healthy:
        state = fleeting.kept.board.get(spec.name)
        assert state is not None
        assert (state.failures, state.interval_s) == (0, INTERVAL_S)

    def states() -> list[Any]:
        return [fleeting.kept.board.get(spec.name) for spec in hanging]

    until(lambda: all(state.failing >= 4 for state in states()))
    assert all(state.interval_s >= 1.6 * INTERVAL_S for state in states())
    assert {state.diagnoses[0].health for state in states()} == {"critical"}
    healed.set()
    until(lambda: {(state.failing, state.interval_s) for state in states()} == {(0, INTERVAL_S)})
    name = hanging[0].name
    before = len(fleeting.times(name))
    until(lambda: len(fleeting.times(name)) >= before + 4)


def test_what_did_not_change_goes_on(serving: Start, fleeting: Fleeting) -> None:
    same, other, gone = (serving(in_turn(HEALTHY)) for _ in range(3))
    fleeting.apply([quick(same.url), quick(other.url), quick(gone.url)])
    until(lambda: all(len(server.requests) >= 3 for server in (same, other, gone)))
    specs = [quick(same.url, interval_s=0.2), quick(other.url, slo__ttft_p99_s=2.0)]
    fleeting.apply(specs)
    assert fleeting.kept.board.get(f"http://127.0.0.1:{gone.port}") is None
    asked = len(gone.requests)
    names = [spec.name for spec in specs]
    seen = [len(fleeting.times(name)) for name in names]
    until(lambda: all(len(fleeting.times(n)) >= s + 5 for n, s in zip(names, seen, strict=True)))
    first, second = (fleeting.kept.board.get(name) for name in names)
    assert first is not None
    assert second is not None
    assert first.cycles >= seen[0] + 4, "not begun anew"
    assert second.cycles >= 4
    assert second.cycles < len(fleeting.times(names[1])), "judged by something else: begun anew"
    assert first.interval_s == 0.2
    assert len(gone.requests) <= asked + 1
    assert fleeting.kept.board.get(f"http://127.0.0.1:{gone.port}") is None
    assert (same.connections, other.connections) == (1, 2)
    assert [len(names) for names in fleeting.told] == [3, 2]


def weak(fleet: TargetJobs, name: str) -> list[weakref.ref[Any]]:
    """Weak references to what is held of a target."""
    watch = fleet._watches[name]  # pyright: ignore[reportPrivateUsage]
    stream = watch._stream  # pyright: ignore[reportPrivateUsage]
    return [weakref.ref(watch), weakref.ref(stream), weakref.ref(stream.monitor)]


def test_a_target_that_is_dropped_leaves_no_memory_behind(
    serving: Start, fleeting: Fleeting
) -> None:
    """What a target was seen to do is the most of what a daemon holds."""
    stays, goes = (serving(in_turn(HEALTHY)) for _ in range(2))
    fleeting.apply([quick(stays.url), quick(goes.url)])
    until(lambda: all(len(server.requests) >= 3 for server in (stays, goes)))
    held = {
        server.port: weak(fleeting.fleet, f"http://127.0.0.1:{server.port}")
        for server in (stays, goes)
    }
    fleeting.apply([quick(stays.url)])
    until(lambda: fleeting.clockwork.busy == 0)
    until(lambda: all(reference() is None for reference in held[goes.port]))
    assert all(reference() is not None for reference in held[stays.port])


def test_a_capture_that_cannot_be_played_changes_nothing(
    serving: Start, fleeting: Fleeting
) -> None:
    server = serving(in_turn(HEALTHY))
    fleeting.apply([quick(server.url)])
    with pytest.raises(CaptureError, match="no such file"):
        fleeting.apply([quick(server.url), quick("no-such.jsonl.gz")])
    assert [spec.address for spec in fleeting.fleet.specs()] == [server.url]
    until(lambda: len(server.requests) >= 3)


class Planned(DueQueue):
    """Notes when each job would run first, from 0 on, and its phase, and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s: list[float] = []
        self.phase_s: dict[str, float] = {}

    def put(
        self,
        name: str,
        job: Job,
        *,
        interval_s: float,
        phases: int = 1,
        first_in_s: float | None = None,
    ) -> None:
        del job
        grid = RunTimes(interval_s=interval_s, phase_s=phase_ratio(name, phases) * interval_s)
        self.first_s.append(first_run_s(grid, 0.0, first_in_s))
        self.phase_s[name] = grid.phase_s


def test_many_targets_do_not_begin_at_once() -> None:
    plain, planned = settings(interval_s=2.0), Planned()
    specs = [TargetSpec(f"t{n}", "http://a:1", {}, plain, None, "test") for n in range(80)]
    TargetJobs(planned, Kept().sinks(), on_targets=lambda _: None).apply(specs)
    assert len(planned.first_s) == 80
    assert 24 < sum(first_s <= 1.0 for first_s in planned.first_s) < 56, "half in half the interval"


def test_a_roster() -> None:
    with pytest.raises(SettingsError, match="no target to watch"):
        Discovery([], settings())
    with pytest.raises(SettingsError, match="two targets are called 'http://a:1': argument 1 and"):
        Discovery(["a:1", "http://a:1"], settings())
    assert Discovery([], settings(file_sd=["/no/such/*.json"])).specs() == []
    roster = Discovery(["a:1"], settings())
    assert [spec.name for spec in roster.specs()] == ["http://a:1"]
    assert not roster.poll()
    other = roster.reloaded(settings(window_s=30.0))
    assert [spec.settings["window_s"] for spec in (*roster.specs(), *other.specs())] == [60, 30]


def test_targets_move_to_other_phases_as_they_become_many() -> None:
    plain, planned = settings(interval_s=4.0), Planned()
    specs = [TargetSpec(f"t{n}", "http://a:1", {}, plain, None, "test") for n in range(160)]
    fleet = TargetJobs(planned, Kept().sinks(), on_targets=lambda _: None)
    fleet.apply(specs[:8])
    assert set(planned.phase_s.values()) == {0.0}, "8 targets are one run"
    fleet.apply(specs)
    assert set(planned.phase_s.values()) == {0.0, 1.0, 2.0, 3.0}
    assert len({planned.phase_s[spec.name] for spec in specs[:8]}) > 1, "the first ones moved"
    planned.phase_s.clear()
    fleet.apply(specs[:159])
    assert not planned.phase_s, "nothing changed for those that stay"


def test_targets_with_the_same_settings_share_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other, made = settings(), settings(), list[Settings]()

    def make(of: Settings) -> Profile:
        made.append(of)
        return target_profile(of)

    monkeypatch.setattr(process, "target_profile", make)
    fleet = TargetJobs(Planned(), Kept().sinks())
    specs = [TargetSpec(name, "http://a", {}, own, None, "") for name in "abc"]
    for _ in range(2):
        fleet.apply([*specs, TargetSpec("d", "http://a", {}, other, None, "")])
    assert [each is of for each, of in zip(made, (own, other), strict=True)] == [True, True]
