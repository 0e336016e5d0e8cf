"""An autoscaler that follows the exported replicas gets what the load needs, and no more."""

from __future__ import annotations

from tests.autoscaling import CALM_S, LOADS, followed, mistakes


def test_an_overload_is_scaled_once() -> None:
    """`python -m tests.autoscaling` has the other loads, each for an hour."""
    load = LOADS["overload 1.5x"]
    cycles = followed(load, removes=True, until_s=CALM_S + 600)
    assert [*mistakes(load, cycles)] == []
    assert [each.replicas for each in cycles][-1] == 4
