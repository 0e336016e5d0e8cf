"""Real engines that scrape as if live say what the sidecar says of the same pages, when it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.dashboards import realtime, victoria
from tests.dashboards.parity import Difference, sidecar
from tests.dashboards.playing import Play, play_of

pytestmark = pytest.mark.live

PAGES = 42
"""Until the cascade's third stage is critical."""

BASELINE = frozenset({"TTFT-TAIL"})
"""Held against quiet medians (test_parity.py)."""

SLOPES = frozenset({"QUEUE-GROWS"})
"""Which scrapes fall into a window decides whether a slope is at its bound."""


def harmful(by_recording: Mapping[str, Sequence[Difference]]) -> list[Difference]:
    """Disagreements about harm: between stages 0 and 1 a slope decides."""
    return [
        difference
        for differences in by_recording.values()
        for difference in differences
        if difference.key not in BASELINE | SLOPES
        and not (difference.key == "stage" and max(difference.sidecar, difference.prometheus) < 2)
    ]


def seen(play: Play) -> set[tuple[str, int]]:
    """What the sidecar says at some time."""
    return {
        item
        for pages in play.pages.values()
        for _, verdict in sidecar(pages, play.plan(1.0))
        for item in (verdict or {}).items()
    }


def test_prometheus_live_says_the_same(tmp_path: Path) -> None:
    play = play_of(["kv_pressure_cascade", "spec_mixed"], pages=PAGES, speed=4.0)
    assert {("stage", 3), ("kv_pressure", 3), ("KV-EVICT", 3)} <= seen(play)
    # Chance decides how long after a scrape rules are evaluated, and so what a window holds.
    assert harmful(realtime.played(play, tmp_path, steps=2)) == []


def test_victoria_metrics_with_vmalert_says_the_same(tmp_path: Path) -> None:
    play = play_of(["kv_pressure_cascade", "spec_mixed"], pages=PAGES, speed=2.0)
    assert {("stage", 3), ("kv_pressure", 3), ("spec_decode_poor", 2)} <= seen(play)
    assert harmful(victoria.played(play, tmp_path)) == []
