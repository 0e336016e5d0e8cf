"""What is learned of an engine: the knee is that of one launch, a trouble hides its own signals."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.learning import Learned
from kneewatch.rules.rule import ITL, LENGTHS, LOAD, PREFIX, TRACKED, TTFT
from tests.diagnose.test_knee import values_at_load
from tests.recordings import WINDOW_S, Phase, phases

LAUNCH = {"num_gpu_blocks": "1000", "block_size": "16", "enable_prefix_caching": "True"}
LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def learned() -> Learned:
    """An engine whose knee is known."""
    server = Learned(Profile())
    server.set_launch(LAUNCH)
    for turn, load in enumerate(3 * LOADS, 1):
        server.knee(60.0 * turn, values_at_load(load, knee_at=8.0))
    return server


def knows_a_knee(server: Learned) -> bool:
    """Whether its knee is known."""
    return server.knee(10_000.0, {}) is not None


def test_a_server_that_comes_back_as_it_was_has_the_same_knee() -> None:
    server = learned()
    server.reset(0.0)
    server.set_launch({**LAUNCH, "num_gpu_blocks": "1010"})
    server.set_launch({})  # a page that tells no configuration
    server.set_launch(LAUNCH)
    assert knows_a_knee(server)


def test_a_server_that_was_launched_otherwise_has_another_knee() -> None:
    for other in ({"num_gpu_blocks": "2000"}, {"enable_prefix_caching": "False"}):
        server = learned()
        server.set_launch({**LAUNCH, **other})
        assert not knows_a_knee(server)


QUEUE = (TTFT, ITL, LOAD)
MOVED = {
    "itl_spikes": (ITL, TTFT),
    "queueing": QUEUE,
    "lora_thrash": (TTFT, LOAD),
    "spec_ineffective": (),
    "prefix_churn": (PREFIX, TTFT, ITL),
    "preempting": (*QUEUE, PREFIX),
    "preempting_and_queueing": (*QUEUE, PREFIX),
}
"""The families of signals that a phase's trouble moves, by its state."""

OF_FAMILY = {
    TTFT: "ttft_p50_s",
    ITL: "itl_mean_s",
    PREFIX: "prefix_hit_ratio",
    LENGTHS: "output_tokens_mean",
    LOAD: "running_avg",
}


@pytest.mark.parametrize(
    ("phase", "moved"),
    [
        pytest.param(phase, MOVED[phase.state], id=f"{phase.capture.name} {phase.name}")
        for phase in phases()
        if phase.state in MOVED
    ],
)
def test_a_trouble_that_never_ends_hides_its_own_signals_only(
    phase: Phase, moved: Collection[str]
) -> None:
    stream = TargetStream("tiny", Profile(window_s=WINDOW_S), Limits())
    for entry in CaptureReader(phase.capture):
        if phase.from_s <= entry.t_s <= phase.to_s:
            stream.replay(entry)
    (engine,) = stream.monitor.engines
    baseline = engine.judge.learned.baseline
    assert all(key in TRACKED[family] for family, key in OF_FAMILY.items())
    unknown = {family for family, key in OF_FAMILY.items() if baseline.get(key) is None}
    assert unknown == set(moved)
