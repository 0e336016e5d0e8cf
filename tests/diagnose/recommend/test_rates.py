"""Sizes are for the rate at which requests arrive, not for how many wait."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import Verdict
from tests.continued import Load, judged
from tests.recordings import CAPTURES

DEMO = CAPTURES / "kv_pressure_cascade.jsonl.gz"
SETTLED_S = 230.0
"""Two minutes after the recording's last page."""


def size(verdict: Verdict, lever: str) -> object:
    """The value that a lever recommends; None if it is not given."""
    return next((a.changes[0].after for a in verdict.recommendations if a.id == lever), None)


LOADS = (
    Load(),
    # What two replicas serve with the safety factor, now and then by little more.
    Load(87.0, 1.33, 9301),
    *[
        Load(waiting, growth_per_s, seed, is_closed=closed)
        for seed, (waiting, growth_per_s, closed) in enumerate(
            [
                (20.0, 1.5, False),
                (2000.0, 1.5, False),
                (20.0, 0.0, True),
                (2000.0, 0.0, True),
                (300.0, 1.5, False),
                (300.0, 0.0, True),
            ]
        )
    ],
)


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_an_overload_that_lasts_does_not_grow_the_advice(load: Load) -> None:
    verdicts = judged(DEMO, load, until_s=400.0)
    replicas = [size(verdict, "replicas") for _, verdict in verdicts]
    assert {each for each in replicas if each is not None} <= {2, 3}
    settled = [verdict for t_s, verdict in verdicts if t_s >= SETTLED_S]
    assert len({size(verdict, "replicas") for verdict in settled}) == 1
    assert len({size(verdict, "kv-blocks") for verdict in settled}) == 1
    blocks = size(settled[-1], "kv-blocks")
    assert isinstance(blocks, int)
    assert blocks <= 8 * 160
    (more,) = [a for a in settled[-1].recommendations if a.id == "replicas"]
    assert_backlog_apart(more, settled[-1], load)


def assert_backlog_apart(more: Advice, verdict: Verdict, load: Load) -> None:
    """The queue is a figure of its own."""
    if load.is_closed:
        assert "wait for their answers" in more.summary
        # The advice for the 90 clients of the recording stays while fewer ask.
        clients = max(90.0, load.waiting + 19)
        assert more.predicted["callers"] == pytest.approx(clients, rel=0.1)
    else:
        waiting = verdict.values["waiting"]
        assert waiting is not None
        assert more.predicted["backlog_requests"] == pytest.approx(waiting, rel=0.5)
        assert "drained in" in more.summary
