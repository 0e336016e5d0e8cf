"""The first advice of 20 seconds of watching, followed on the simulator."""

from __future__ import annotations

import pytest

from tests.watched import FAULTS, watched


@pytest.mark.parametrize("seed", [6, 8])
@pytest.mark.parametrize("cause", FAULTS)
def test_the_first_advice_serves_a_closed_loop(cause: str, seed: int) -> None:
    """Clients that each wait for their answer: nothing in 20 s tells them from a backlog."""
    run = watched(cause, seed, watch_s=20.0)
    assert run.advice is not None, run.words
    assert not run.is_back, run.words
