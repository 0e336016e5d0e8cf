"""Prefixes that move when a fleet is resized, on the guide's examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.replica_count import remapped_ratio


@pytest.mark.parametrize(
    ("consistent", "expected"),
    [
        pytest.param(False, 4 / 5, id="guide 7.3: modulo moves (N - 1) / N"),
        pytest.param(True, 1 / 5, id="guide 7.3: consistent hashing moves 1 / N"),
    ],
)
def test_growing_from_four_to_five_replicas(consistent: bool, expected: float) -> None:
    moved = remapped_ratio(replicas=4, new_replicas=5, consistent=consistent)
    assert moved == pytest.approx(expected)
    assert 17 % 4 == 1  # guide 7.3: hash 17 moves from replica 1 ...
    assert 17 % 5 == 2  # ... to replica 2


def test_doubling_moves_half_either_way() -> None:
    assert remapped_ratio(replicas=4, new_replicas=8, consistent=False) == 0.5
    assert remapped_ratio(replicas=4, new_replicas=8, consistent=True) == 0.5


@given(old=st.integers(1, 40), new=st.integers(1, 40))
def test_consistent_hashing_never_moves_more_than_modulo(old: int, new: int) -> None:
    modulo, ring = (
        remapped_ratio(replicas=old, new_replicas=new, consistent=consistent)
        for consistent in (False, True)
    )
    moved = sum(key % old != key % new for key in range(old * new)) / (old * new)
    assert modulo == pytest.approx(moved)
    assert 0 <= ring <= modulo + 1e-9
    if new == old + 1:
        assert modulo == pytest.approx(1 - 1 / new)
        assert ring == pytest.approx(1 / new)
