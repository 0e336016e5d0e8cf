"""The learned knee over a restart of the daemon: it is stored with what else was learned."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.daemon.baselines import LearnedStates
from kneewatch.agent.daemon.cycle import TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.writer import Store
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.capacity import LearnedKnee
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.learning import Learned
from kneewatch.diagnose.learned.knee import FORGOTTEN_S, same_launch
from kneewatch.diagnose.recommend.step_times import StepTimes
from tests.agent.daemon.factories import Kept, target
from tests.agent.daemon.running import Daemon
from tests.agent.running import bodies, in_turn
from tests.agent.store.factories import KEEP_ALL, cycle, diagnosis
from tests.collector.servers import Serve, Start, answer
from tests.diagnose.streams import pages_config
from tests.diagnose.test_knee import values_at_load
from tests.soak.growing import Growing
from tests.waiting import PATIENCE_S, until

NOW_S = 1_795_420_800.0
LAUNCH = {"num_gpu_blocks": "4096", "cache_dtype": "auto"}
LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
Row = tuple[float, Mapping[str, float]]


def loaded(
    end_s: float, *, knee_at: float = 8.0, rounds: int = 3, step_s: float = 60.0
) -> list[Row]:
    """What an engine's scrapes said: loads up and down, four minutes of each, until a time."""
    loads = [load for _ in range(rounds) for load in LOADS for _ in range(round(240 / step_s))]
    start_s = end_s - step_s * len(loads)
    return [
        (start_s + step_s * at, values_at_load(load, knee_at=knee_at))
        for at, load in enumerate(loads, 1)
    ]


def learned(
    end_s: float = NOW_S, config: Mapping[str, str] = LAUNCH, more: Mapping[str, float] = {}
) -> Learned:
    """What a daemon learned from loads up to a time."""
    server = Learned(Profile())
    server.set_launch(config)
    for t_s, values in loaded(end_s, step_s=20.0):
        server.knee(t_s, {**values, **more})
    return server


def stored(server: Learned, now_s: float = NOW_S) -> bytes:
    """What is written of it."""
    body = server.state(now_s)
    assert body is not None
    return body


def restored(body: bytes, config: Mapping[str, str] = LAUNCH) -> Learned:
    """The same engine in the next daemon, after two pages."""
    server = Learned(Profile())
    server.set_launch(config)
    server.knee(NOW_S + 60.0, {})
    server.restore(body)
    server.set_launch(config)
    return server


def knee_of(server: Learned, now_s: float = NOW_S + 65.0) -> LearnedKnee | None:
    """The knee at the next scrape."""
    return server.knee(now_s, {})


def test_it_is_what_was_learned_before() -> None:
    server = learned()
    before, now = knee_of(server), knee_of(restored(stored(server)))
    assert before is not None
    assert now is not None
    assert (now.points, now.steps, now.reached) == (before.points, before.steps, True)
    assert before.points == 12 * len(LOADS), "as many as are kept"
    assert now.c_max.expected == pytest.approx(before.c_max.expected) == 8.0


def test_step_times_are_those_of_the_process_before() -> None:
    steps = {"itl_mean_s": 0.02, "prefill_mean_s": 0.05, "prompt_tokens_mean": 300.0}
    server = restored(stored(learned(more=steps)))
    own = StepTimes.of(server.curve, NOW_S)
    assert own is not None
    assert (own.least_running, own.most_running) == (1, 64)
    assert own.itl_s(32.0, 350.0) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("now", "knee_at"),
    [
        pytest.param({**LAUNCH, "num_gpu_blocks": "4100"}, 8.0, id="blocks as measured"),
        pytest.param({**LAUNCH, "num_gpu_blocks": "8192"}, None, id="twice the blocks"),
        pytest.param({**LAUNCH, "cache_dtype": "fp8"}, None, id="another flag"),
        pytest.param({**LAUNCH, "new_in_this_version": "1"}, None, id="another version"),
    ],
)
def test_an_engine_launched_otherwise_inherits_nothing(
    now: Mapping[str, str], knee_at: float | None
) -> None:
    knee = knee_of(restored(stored(learned()), now))
    assert (None if knee is None else knee.c_max.expected) == knee_at


def test_older_weeks_say_nothing() -> None:
    assert knee_of(restored(stored(learned(NOW_S - FORGOTTEN_S)))) is None


def test_an_hour_of_many_loads_takes_little_room() -> None:
    assert len(stored(learned())) < 16_000


def test_configurations_of_numbers_and_words() -> None:
    blocks = {"num_gpu_blocks": "1000"}
    assert same_launch(blocks, {"num_gpu_blocks": "1049"})
    assert not same_launch(blocks, {"num_gpu_blocks": "1060"})
    assert not same_launch(blocks, {"num_gpu_blocks": "None"})
    assert not same_launch(blocks, {})
    assert same_launch({}, {})


# The daemon

PAST = 62, 70
"""Pages of the recorded server with 63 requests in flight; its TTFT P99 of half a second is over
this."""

SLO_S = 0.4


def without_end(growing: Growing) -> Serve:
    """Serves a page a request: the load goes on for as long as anyone asks."""

    def serve(sock: socket.socket, _request: bytes, number: int) -> bool:
        sock.sendall(answer(growing.page(number)))
        return True

    return serve


def keep(path: Path, name: str) -> None:
    """What a daemon knew of the recorded server: it keeps the target with 16 requests."""
    config = {key: value for key, value in pages_config("knee_sweep").items() if key != "engine"}
    now_s = time.time()
    server = learned(now_s - 600.0, config)
    key = EngineKey("tiny", "0")
    store = Store.open(path, retention=KEEP_ALL)
    store.learn(name, key, now_s, stored(server, now_s))
    store.put(cycle(diagnosis(now_s)))
    store.close(PATIENCE_S)


def test_the_next_cycle_is_held_against_it(serving: Start, tmp_path: Path) -> None:
    spec = target(serving(in_turn(bodies("knee_sweep", *PAST))).url, slo__ttft_p99_s=SLO_S)
    keep(tmp_path / "store.db", spec.name)
    kept, reader = Kept(), Reader(tmp_path / "store.db")
    states = LearnedStates(reader, lambda _target, _key, _t_s, _state: None)
    sinks = replace(kept.sinks(), exchanges=(states.exchange,))
    start_s = time.time()
    clock = iter(start_s + 2.0 * at for at in range(100))
    profile = target_profile(spec.settings)
    watch = TargetWatch(spec, profile, sinks, wall=lambda: next(clock))
    for _ in range(7):
        watch.cycle()
        states.cycle()
    (diagnosis,) = kept.states[-1].diagnoses
    texts = [text.text for cause in diagnosis.causes for text in cause.evidence]
    assert "past_knee" in [cause.id for cause in diagnosis.causes]
    assert any("the knee is at 16 " in text for text in texts), texts
    watch.retire()
    reader.close()


def says(daemon: Daemon, said: str) -> bool:
    """Whether its newest diagnoses hold these words."""
    return said in daemon.get("/api/v1/triage?format=json")


def test_a_daemon_that_was_killed_knows_it_at_once(serving: Start, tmp_path: Path) -> None:
    # The load goes on, and it is the quiet one from the second window on: until then it is past the
    # knee.
    keep(tmp_path / "kneewatch.db", "tiny")
    config = tmp_path / "k.toml"
    options = ("--config", config, "--interval", "0.1s", "--gpu-metrics", "none")
    for said in ('"tiny"', "the knee is at 16 "):
        config.write_text(
            f"window_s = {PATIENCE_S}\nslo.ttft_p99_s = {SLO_S}\n[[targets]]\n"
            f'name = "tiny"\nurl = "{serving(without_end(Growing("knee_sweep", *PAST))).url}"\n'
        )
        with Daemon(tmp_path, *options) as daemon:
            until(partial(says, daemon, said))
            daemon.process.send_signal(signal.SIGKILL)
            assert daemon.process.wait() == -signal.SIGKILL
            assert "Traceback" not in daemon.log
