"""One target's cycles: what store, board and notifier are given."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kneewatch.agent.daemon.cycle import TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.daemon.node_gpus import GpuClaim
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.values import GpuReading
from kneewatch.reports.health import SourceState
from tests.agent.daemon.factories import Kept, settings, target, watch
from tests.agent.running import bodies, capture, in_turn
from tests.agent.test_diagnose_live import two_engines, unused_url
from tests.collector.servers import Start, always, answer
from tests.pages import recreated, restarted
from tests.waiting import PATIENCE_S

HEALTHY = bodies("healthy_light", 10, 30)


class Clock:
    """A wall clock that goes on by 5 s a look."""

    def __init__(self) -> None:
        self.now_s = 1_900_000_000.0

    def __call__(self) -> float:
        self.now_s += 5.0
        return self.now_s


@pytest.fixture
def kept() -> Kept:
    return Kept()


Watching = Callable[..., TargetWatch]


@pytest.fixture
def watching(kept: Kept) -> Iterator[Watching]:
    """Puts targets under watch; when the test is over their connections are closed."""
    watches: list[TargetWatch] = []

    def begin(spec: TargetSpec, **more: Any) -> TargetWatch:  # noqa: ANN401
        more.setdefault("wall", Clock())
        watches.append(watch(spec, kept, **more))
        return watches[-1]

    yield begin
    for target_watch in watches:
        target_watch.retire()


def run(target_watch: TargetWatch, cycles: int) -> list[float | None]:
    """Some cycles; what each says about the next."""
    return [target_watch.cycle() for _ in range(cycles)]


def test_what_a_cycle_leaves(serving: Start, kept: Kept, watching: Watching) -> None:
    spec = target(serving(in_turn(HEALTHY)).url)
    assert run(watching(spec), 4) == [None] * 4
    assert [cycle.t_s for cycle in kept.cycles] == [1_900_000_000.0 + 5 * n for n in range(1, 5)]
    first, *_, last = kept.cycles
    assert (last.target, last.labels, last.error) == (spec.name, {}, None)
    (engine,) = last.engines
    assert engine.diagnosis.health == "ok"
    assert engine.config["block_size"] == "32"
    assert engine.started_s is not None
    assert 1.7e9 < engine.started_s < 1.9e9
    assert (engine.restart, engine.replica) == (None, "")
    by_name = dict(zip(engine.columns, engine.counters, strict=True))
    tokens = [by_name[column] for column in by_name if column.metric == "generation_tokens"]
    assert tokens[0] > 0
    (before,) = first.engines
    assert before.columns is engine.columns, "as long as the series are the same"
    assert before.counters != engine.counters


def test_what_the_board_shows(serving: Start, kept: Kept, watching: Watching) -> None:
    spec = target(serving(in_turn(HEALTHY)).url)
    run(watching(spec), 3)
    state = kept.states[-1]
    assert kept.board.get(spec.name) is state
    assert (state.url, state.cycles, state.failures, state.failing) == (spec.address, 3, 0, 0)
    assert state.interval_s == 5.0
    assert [diagnosis.health for diagnosis in state.diagnoses] == ["ok"]
    assert [(source.name, source.success, source.error) for source in state.sources] == [
        ("page", True, "")
    ]


def test_a_dead_target_is_backed_off_from_and_comes_back(
    serving: Start, kept: Kept, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"is": False}
    page = in_turn(HEALTHY)

    def serve(sock: socket.socket, request: bytes, number: int) -> bool | None:
        if gone["is"]:
            return False
        return page(sock, request, number)

    spec = target(serving(serve).url)
    target_watch = watching(spec, jitter=lambda: 0.0)
    with caplog.at_level(logging.INFO):
        assert run(target_watch, 2) == [None, None]
        gone["is"] = True
        assert run(target_watch, 7) == [5, 5, 10, 20, 40, 60, 60]
        assert [state.interval_s for state in kept.states[2:]] == [5, 5, 10, 20, 40, 60, 60]
        state = kept.states[-1]
        assert (state.failures, state.failing, state.severity.word) == (7, 7, "critical")
        assert [diagnosis.health for diagnosis in state.diagnoses] == ["critical"]
        assert [diagnosis.model for diagnosis in state.diagnoses] == ["tiny"], (
            "what was learnt is kept"
        )
        assert not state.sources[0].success
        assert kept.cycles[-1].error == state.sources[0].error != ""
        assert kept.cycles[-1].engines[0].columns == ()
        gone["is"] = False
        assert run(target_watch, 2) == [None, None]
    assert (kept.states[-1].failing, kept.states[-1].interval_s) == (0, 5.0)
    assert kept.cycles[-1].error is None
    said = [record.getMessage().split(" target=")[0] for record in caplog.records]
    assert said == [
        "target up",
        "target down",
        *["target still down, backing off"] * 4,
        "target up again",
    ]


def test_a_target_that_never_answered(kept: Kept, watching: Watching) -> None:
    spec = target(unused_url())
    run(watching(spec), 3)
    (diagnosis,) = kept.states[-1].diagnoses
    assert (diagnosis.health, diagnosis.model, diagnosis.stage.number) == ("critical", "", None)
    assert "connection refused" in (kept.cycles[-1].error or "")


def test_a_page_without_vllm_is_a_failure(serving: Start, kept: Kept, watching: Watching) -> None:
    spec = target(serving(always(answer(b"# TYPE up gauge\nup 1\n"))).url)
    run(watching(spec), 1)
    assert "no vLLM metrics" in (kept.cycles[-1].error or "")
    assert kept.states[-1].diagnoses[0].health == "unknown"


def test_a_restart_is_told_once(serving: Start, kept: Kept, watching: Watching) -> None:
    again = [recreated(restarted(page.decode()), 1000.0).encode() for page in HEALTHY[3:6]]
    spec = target(serving(in_turn([*HEALTHY[:3], *again])).url)
    run(watching(spec), 6)
    restarts = [cycle.engines[0].restart for cycle in kept.cycles]
    assert [restart is not None for restart in restarts] == [False] * 3 + [True] + [False] * 2
    started = [cycle.engines[0].started_s for cycle in kept.cycles]
    assert started[2] != started[3] == 1_799_000_000.0


def test_columns_are_others_only_when_others_come(
    serving: Start, kept: Kept, watching: Watching
) -> None:
    plain = HEALTHY[0].decode()
    gauge = (
        plain + 'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="x"} 0\n'
    )
    counter = (
        plain + 'vllm:request_success_total{engine="0",finished_reason="x",model_name="tiny"} 5\n'
    )
    pages = [plain, gauge, counter, plain]
    run(watching(target(serving(in_turn([page.encode() for page in pages])).url)), 4)
    engines = [cycle.engines[0] for cycle in kept.cycles]
    first, second, third, fourth = (engine for engine in engines if engine.columns)
    assert second.columns is first.columns
    assert len(third.columns) == len(first.columns) + 1
    assert third.counters[-1] == 5
    assert fourth.columns is third.columns
    assert math.isnan(fourth.counters[-1])
    assert all(len(engine.counters) == len(engine.columns) for engine in engines)


def test_engines_and_tiers(serving: Start, kept: Kept, watching: Watching) -> None:
    pages = [two_engines(page) for page in HEALTHY]
    spec = target(serving(in_turn(pages)).url, gpu="h100-sxm")
    run(watching(spec), 2)
    assert [diagnosis.engine for diagnosis in kept.states[-1].diagnoses] == ["0", "1"]
    assert {diagnosis.tier for diagnosis in kept.states[-1].diagnoses} == {"tiny@h100-sxm"}
    stored = [engine.diagnosis for engine in kept.cycles[-1].engines]
    assert stored == list(kept.states[-1].diagnoses)
    assert all(engine.columns for engine in kept.cycles[-1].engines)


def test_the_tier_that_a_label_states(serving: Start, kept: Kept, watching: Watching) -> None:
    plain = target(serving(in_turn(HEALTHY)).url, gpu="h100-sxm")
    spec = TargetSpec(plain.name, plain.address, {"tier": "chat"}, plain.settings, None, "test")
    run(watching(spec), 1)
    assert kept.states[-1].diagnoses[0].tier == "chat"
    assert kept.cycles[-1].labels == kept.states[-1].labels == {"tier": "chat"}


def test_no_tier_where_nothing_states_one(serving: Start, kept: Kept, watching: Watching) -> None:
    run(watching(target(serving(in_turn(HEALTHY)).url)), 1)
    assert kept.states[-1].diagnoses[0].tier is None


class Gpus(GpuSources):
    """GPU sources that read nothing."""

    def __init__(self) -> None:
        pass

    def reading(self, spec: TargetSpec, t_s: float) -> GpuReading:
        del spec, t_s
        return GpuReading({"gpu_engine_active_ratio": 0.5}, ())

    def set_used(self, target: str, used: GpuClaim) -> None:
        del target, used

    def states(self, spec: TargetSpec) -> list[SourceState]:
        return [SourceState("dcgm", 1.0, True, 0.1, joined=f"all of {spec.name}")]


def test_gpus(serving: Start, kept: Kept, watching: Watching) -> None:
    spec = target(serving(in_turn(HEALTHY)).url)
    target_watch = watching(spec, gpus=Gpus())
    run(target_watch, 2)
    state = kept.board.get(spec.name)
    assert state is not None
    assert state.diagnoses[0].values["gpu_engine_active_ratio"] == 0.5
    assert [source.name for source in state.sources] == ["page", "dcgm"]


def test_a_bug_is_no_health(serving: Start, kept: Kept, watching: Watching) -> None:
    spec = target(serving(in_turn(HEALTHY)).url)
    target_watch = watching(spec, jitter=lambda: 0.0)
    run(target_watch, 2)
    assert [target_watch.crashed(ValueError("oops")) for _ in range(3)] == [5, 5, 10]
    assert kept.cycles[-1].error == "internal error: ValueError: oops"
    (diagnosis,) = kept.states[-1].diagnoses
    assert (diagnosis.health, diagnosis.causes[0].id, diagnosis.stage.number) == (
        "critical",
        "target_down",
        None,
    )
    assert run(target_watch, 1) == [None]
    assert kept.states[-1].diagnoses[0].health == "ok"


def test_a_retired_watch_tells_nobody(serving: Start, kept: Kept, watching: Watching) -> None:
    target_watch = watching(target(serving(in_turn(HEALTHY)).url))
    run(target_watch, 1)
    target_watch.retire()
    assert run(target_watch, 1) == [None]
    target_watch.crashed(ValueError("oops"))
    assert (len(kept.cycles), len(kept.states)) == (1, 1)


def test_a_watch_is_retired_while_its_server_hangs(
    serving: Start, kept: Kept, watching: Watching
) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def late(sock: socket.socket, _request: bytes, _number: int) -> bool:
        asked.set()
        may_answer.wait(PATIENCE_S)
        sock.sendall(answer(HEALTHY[0]))
        return False

    target_watch = watching(target(serving(late).url))
    cycle = threading.Thread(target=target_watch.cycle)
    cycle.start()
    assert asked.wait(PATIENCE_S)
    retire = threading.Thread(target=target_watch.retire)
    retire.start()
    retire.join(PATIENCE_S / 4)
    assert not retire.is_alive(), "it does not wait for the cycle"
    may_answer.set()
    cycle.join(PATIENCE_S)
    assert not kept.states


def test_a_clock_set_back_a_little_says_nothing_and_keeps_what_is_known(
    serving: Start, kept: Kept, watching: Watching
) -> None:
    times = iter([100.0, 105.0, 104.5, 110.0])
    spec = target(serving(in_turn(HEALTHY)).url)
    run(watching(spec, wall=lambda: next(times)), 4)
    assert [len(cycle.engines) for cycle in kept.cycles] == [1, 1, 0, 1]
    assert all(len(state.diagnoses) == 1 for state in kept.states)


def test_a_capture_is_played_and_started_over(kept: Kept, watching: Watching) -> None:
    target_watch = watching(target(str(capture("healthy_light"))))
    after_s = target_watch.cycle()
    assert after_s is not None
    assert 0 < after_s < 3
    state = kept.states[-1]
    assert (state.name, state.interval_s) == ("healthy_light", after_s)
    assert kept.cycles[0].engines[0].restart is None


def test_other_settings_are_taken_up(serving: Start, kept: Kept, watching: Watching) -> None:
    server = serving(in_turn(HEALTHY))
    spec = target(server.url)
    target_watch = watching(spec)
    run(target_watch, 2)
    headers = settings(fetch__headers={"X-Key": "sesame"})
    target_watch.adopt(TargetSpec(spec.name, spec.address, {"a": "b"}, headers, None, "test"))
    run(target_watch, 1)
    assert b"X-Key: sesame" in server.requests[-1]
    assert server.connections == 2
    assert kept.states[-1].labels == {"a": "b"}
    assert kept.states[-1].diagnoses[0].values["generation_tokens_per_s"], "its history is kept"
    run(target_watch, 1)
    assert server.connections == 2


def test_what_is_stated_must_be_known() -> None:
    for values, says in (
        ({"gpu": "h1000"}, "test: .*h1000"),
        ({"interval_s": 0.01}, "test: interval_s = 0.01 is too short"),
        ({"launch_file": "/no/such"}, "test: launch_file /no/such does not exist"),
    ):
        with pytest.raises(SettingsError, match=says):
            target_profile(target("a", **values).settings)


def test_a_page_that_takes_much_cpu_is_scraped_less_often(
    serving: Start, kept: Kept, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, heavy = watching(target(serving(in_turn(HEALTHY)).url)), kept.heavy
    assert run(watched, 1) == [None]
    step_s = 0.0, 0.5, 1.0, 2.5, 3.0, 5.0  # begin and end of each step
    spent = iter((*step_s, *step_s, *[0.0] * 6))
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    heavy.add("other")
    assert run(watched, 1) == [32.0], "an eighth of a core: half of what all heavy targets may take"
    heavy.remove("other")
    assert run(watched, 1) == [16.0], "a quarter of a core"
    assert run(watched, 1) == [None]
    assert not heavy
