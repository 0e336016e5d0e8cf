"""The learned knee over a restart: from a real history to what is concluded at once."""

from __future__ import annotations

import math
import signal
import socket
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.daemon.baselines import RETRY_S, KneeLoader, Windows
from kneewatch.agent.daemon.cycle import TargetWatch
from kneewatch.agent.daemon.discovery import TargetProfiles
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import (
    DAY_S,
    Cycle,
    Retention,
    Series,
    StoredEngine,
)
from kneewatch.agent.store.writer import Store
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.capacity import LearnedKnee
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.engine_monitor import EngineMonitor
from kneewatch.diagnose.engine.judge import Catalogue
from kneewatch.diagnose.engine_history import ConfigChange
from kneewatch.diagnose.learned.knee import LOAD_SIGNALS, WINDOW_SIGNALS, LiveKnee, same_launch
from kneewatch.diagnose.recommend.step_times import StepTimes
from kneewatch.rules.facts import Targets
from tests.agent.daemon.factories import Kept, target
from tests.agent.daemon.running import Daemon
from tests.agent.running import bodies, in_turn
from tests.agent.store.factories import counted, cycle, diagnosis, written
from tests.collector.servers import Serve, Start, answer
from tests.diagnose.streams import pages_config
from tests.diagnose.test_knee import values_at_load
from tests.soak.growing import Growing
from tests.waiting import PATIENCE_S, until

NOW_S = 1_795_420_800.0
KEY = EngineKey("tiny", "0")
LAUNCH = {"num_gpu_blocks": "4096", "cache_dtype": "auto"}
LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SAID = [values_at_load(load, knee_at=8.0) for load in LOADS]
PROFILE = Profile()
CATALOGUE = Catalogue.of(PROFILE)
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


def cycles(
    rows: Sequence[Row], config: Mapping[str, str] = LAUNCH, *, name: str = "a"
) -> list[Cycle]:
    """What a daemon gives its store of them."""
    return [
        cycle(
            replace(diagnosis(t_s, target=name, values=values), model="tiny"),
            raw=counted(t_s),
            config=config,
        )
        for t_s, values in rows
    ]


def engine(first_s: float = NOW_S, config: Mapping[str, str] = LAUNCH) -> EngineMonitor:
    """An engine that has just been seen for the first time."""
    seen = EngineMonitor("a", KEY, PROFILE, CATALOGUE)
    seen.reader.history.info = {"cache_config_info": config}
    seen.judge.learned.knee.update(first_s, {})
    return seen


def recalled(path: Path, seen: EngineMonitor) -> LearnedKnee | None:
    """What it is known to carry at its next scrape, and whether it was read in bounded steps."""
    reader = Reader(path)
    knees = KneeLoader(reader)
    knees.exchange("a", seen, NOW_S)
    while knees.cycle() is not None:
        pass
    reader.close()
    return seen.judge.learned.knee.update((seen.judge.learned.knee.first_s or 0.0) + 5.0, {})


def test_it_is_what_was_learned_before(tmp_path: Path) -> None:
    rows = loaded(NOW_S - 60.0, step_s=20.0)
    path = tmp_path / "store.db"
    written(path, *cycles(rows))
    live = LiveKnee(window_s=60.0, targets=Targets(None, None))
    for t_s, values in rows:
        live.update(t_s, values)
    before, now = live.update(NOW_S + 5.0, {}), recalled(path, engine())
    assert before is not None
    assert now is not None
    assert (now.points, now.steps, now.reached) == (before.points, before.steps, True)
    assert before.points == 12 * len(LOADS), "as many as are kept"
    assert now.c_max.expected == pytest.approx(before.c_max.expected) == 8.0


def test_step_times_are_those_of_the_process_before(tmp_path: Path) -> None:
    steps = {"itl_mean_s": 0.02, "prefill_mean_s": 0.05, "prompt_tokens_mean": 300.0}
    rows = [(t_s, {**values, **steps}) for t_s, values in loaded(NOW_S - 60.0, rounds=1)]
    path, seen = tmp_path / "store.db", engine()
    written(path, *cycles(rows))
    recalled(path, seen)
    own = StepTimes.of(seen.judge.learned.knee.curve, NOW_S)
    assert own is not None
    assert (own.least_running, own.most_running) == (1, 64)
    assert own.itl_s(32.0, 350.0) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("was", "now", "knee_at"),
    [
        pytest.param(LAUNCH, {**LAUNCH, "num_gpu_blocks": "4100"}, 8.0, id="blocks as measured"),
        pytest.param(LAUNCH, {**LAUNCH, "num_gpu_blocks": "8192"}, None, id="twice the blocks"),
        pytest.param(LAUNCH, {**LAUNCH, "cache_dtype": "fp8"}, None, id="another flag"),
        pytest.param(LAUNCH, {**LAUNCH, "new_in_this_version": "1"}, None, id="another version"),
    ],
)
def test_an_engine_launched_otherwise_inherits_nothing(
    tmp_path: Path, was: Mapping[str, str], now: Mapping[str, str], knee_at: float | None
) -> None:
    path = tmp_path / "store.db"
    written(path, *cycles(loaded(NOW_S - 60.0), was))
    knee = recalled(path, engine(config=now))
    assert (None if knee is None else knee.c_max.expected) == knee_at


def test_of_launches_only_the_last_like_ones_count(tmp_path: Path) -> None:
    path, hour_s = tmp_path / "store.db", 3600.0
    written(
        path,
        *cycles(loaded(NOW_S - 9 * hour_s, knee_at=64.0, rounds=2)),
        *cycles(loaded(NOW_S - 5 * hour_s, knee_at=64.0, rounds=1), {**LAUNCH, "cache_dtype": "x"}),
        *cycles(loaded(NOW_S - hour_s, rounds=1)),
    )
    knee = recalled(path, engine())
    assert knee is not None
    assert (knee.c_max.expected, knee.points) == (8.0, 4 * len(LOADS))


def test_only_what_came_before_the_first_scrape_counts(tmp_path: Path) -> None:
    rows = loaded(NOW_S + 600.0, rounds=1)
    path = tmp_path / "store.db"
    written(path, *cycles(rows))
    seen = engine(first_s=NOW_S - 30.0)
    for t_s, values in rows:
        if t_s >= NOW_S:
            seen.judge.learned.knee.update(t_s, values)
    live = LiveKnee(window_s=60.0, targets=Targets(None, None))
    for t_s, values in rows:
        live.update(t_s, values)
    both, whole = recalled(path, seen), live.update(rows[-1][0] + 60.0, {})
    assert both is not None
    assert whole is not None
    assert both.points == whole.points, "what it has seen itself is not counted twice"


def test_other_models_and_older_weeks_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, *cycles(loaded(NOW_S - 15 * DAY_S)))
    assert recalled(path, engine()) is None
    seen = engine(first_s=NOW_S - 14 * DAY_S)
    assert recalled(path, seen) is not None
    other = EngineMonitor("a", EngineKey("other", "0"), PROFILE, CATALOGUE)
    other.reader.history.info = {"cache_config_info": LAUNCH}
    other.judge.learned.knee.update(NOW_S - 14 * DAY_S, {})
    assert recalled(path, other) is None


def test_a_value_a_minute_tells_as_well(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    old = loaded(NOW_S - 3 * DAY_S)
    clock_s = [old[0][0]]
    store = Store.open(path, retention=Retention(keep_s=DAY_S), clock=lambda: clock_s[0])
    for stored in (*cycles(old), *cycles([(NOW_S - 60.0, values_at_load(1.0, knee_at=8.0))])):
        clock_s[0] = stored.t_s
        store.put(stored)
    store.close(PATIENCE_S)
    knee = recalled(path, engine())
    assert knee is not None
    assert knee.c_max.expected == pytest.approx(8.0, rel=0.5)


class Held(Reader):
    """A history of many days, each alike, that can be gone."""

    def __init__(self) -> None:
        self.broken, self.reads, self.whole = False, 0, 0

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """One engine."""
        if self.broken:
            raise StoreError("gone")
        return [StoredEngine(7, target or "", "tiny", "0", "", {}, 0.0, NOW_S)]

    def configs(self, engine_id: int, *, from_s: float, to_s: float) -> list[ConfigChange]:
        """Launched once."""
        del engine_id, from_s, to_s
        return [ConfigChange(0.0, {}, LAUNCH, "")]

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """A scrape a minute, four of each load."""
        del engine_id
        self.reads += 1
        self.whole += len(keys) > len(LOAD_SIGNALS)
        first, last = math.ceil(from_s / 60), math.floor(to_s / 60)
        said = [SAID[at // 4 % len(LOADS)] for at in range(first, last + 1)]
        times = array("d", [60.0 * at for at in range(first, last + 1)])
        return Series(
            times, {key: array("d", [values.get(key, math.nan) for values in said]) for key in keys}
        )


def test_days_are_read_one_at_a_time_with_rests_between() -> None:
    history, clock_s = Held(), [0.0]

    def clock() -> float:
        clock_s[0] += 0.01
        return clock_s[0]

    knees, seen = KneeLoader(history, clock), engine()
    assert knees.cycle() is None, "nobody waits"
    knees.exchange("a", seen, NOW_S)
    rests = list(iter(knees.cycle, None))
    assert history.whole == 1, "all days are alike: the newest has enough windows of each load"
    assert history.reads == 14
    assert all(rest_s is not None and rest_s > 0.01 for rest_s in rests)
    assert seen.judge.learned.knee.history_requested
    assert seen.judge.learned.knee.update(NOW_S + 5.0, {}) is not None


def test_a_history_that_takes_long_is_read_in_part() -> None:
    history, clock_s = Held(), [0.0]

    def slow() -> float:
        clock_s[0] += 0.2
        return clock_s[0]

    knees = KneeLoader(history, slow)
    knees.exchange("a", engine(), NOW_S)
    list(iter(knees.cycle, None))
    assert history.reads == 5, "a second of CPU time, the newest days first"


def test_a_history_that_is_gone_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    history, seen = Held(), engine()
    knees = KneeLoader(history)
    knees.exchange("a", seen, NOW_S)
    history.broken = True
    knees.cycle()
    assert knees.cycle() == RETRY_S
    assert "cannot read past windows, retrying" in caplog.text
    history.broken = False
    list(iter(knees.cycle, None))
    assert seen.judge.learned.knee.update(NOW_S + 5.0, {}) is not None


def test_no_window_reaches_into_another() -> None:
    history, windows = Held(), Windows(100.0)
    for end_s in (NOW_S, NOW_S - 3660.0):
        windows.add_older(history.signals(7, WINDOW_SIGNALS, from_s=end_s - 3600.0, to_s=end_s))
    times = [point.t_s for point in windows.points()]
    assert len(times) > 40
    assert all(after - before >= 100.0 for before, after in pairwise(times))


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


def history(path: Path, name: str) -> None:
    """A history of the recorded server, by which it keeps the target with 16 requests."""
    config = {key: value for key, value in pages_config("knee_sweep").items() if key != "engine"}
    written(path, *cycles(loaded(time.time() - 600.0), config, name=name))


def test_the_next_cycle_is_held_against_it(serving: Start, tmp_path: Path) -> None:
    spec = target(serving(in_turn(bodies("knee_sweep", *PAST))).url, slo__ttft_p99_s=SLO_S)
    history(tmp_path / "store.db", spec.name)
    reader, kept = Reader(tmp_path / "store.db"), Kept()
    knees = KneeLoader(reader)
    sinks = replace(kept.sinks(), exchanges=(knees.exchange,))
    start_s = time.time()
    clock = iter(start_s + 2.0 * at for at in range(100))
    profile = TargetProfiles().of([spec])[spec.name]
    watch = TargetWatch(spec, profile, sinks, wall=lambda: next(clock))
    watch.cycle()
    while knees.cycle() is not None:
        pass
    for _ in range(6):
        watch.cycle()
    (diagnosis,) = kept.states[-1].diagnoses
    texts = [text.text for cause in diagnosis.causes for text in cause.evidence]
    assert "past_knee" in [cause.id for cause in diagnosis.causes]
    assert any("the knee is at 16 " in text for text in texts), texts
    assert knees.cycle() is None, "it is asked once"
    watch.retire()
    reader.close()


def says(daemon: Daemon, said: str) -> bool:
    """Whether its newest diagnoses hold these words."""
    return said in daemon.get("/api/v1/triage?format=json")


def test_a_daemon_that_was_killed_knows_it_at_once(serving: Start, tmp_path: Path) -> None:
    # The load goes on, and it is the quiet one from the second window on: until then it is past the
    # knee, whenever the history is read, which is every 10 s.
    history(tmp_path / "kneewatch.db", "tiny")
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
