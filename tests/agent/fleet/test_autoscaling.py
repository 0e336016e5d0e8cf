"""An autoscaler that follows the exported replicas gets what the load needs, and no more."""

from __future__ import annotations

import pytest

from tests.autoscaling import CALM_S, LOADS, followed, mistakes


@pytest.mark.parametrize(
    ("name", "seconds", "replicas"), [("overload 1.5x", 600, 4), ("hung replica of 2", 240, 2)]
)
def test_replicas_follow_the_load(name: str, seconds: int, replicas: int) -> None:
    """`python -m tests.autoscaling` has the other loads, each for an hour."""
    load = LOADS[name]
    cycles = followed(load, removes=True, until_s=CALM_S + seconds)
    assert [*mistakes(load, cycles)] == []
    assert [each.replicas for each in cycles][-1] == replicas
