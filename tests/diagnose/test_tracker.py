"""Causes over time: what comes and goes at its edge stays told while it goes on."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.engine.diagnosis import CauseTracker
from tests.diagnose.situations import CONCLUSIVE, NOW_S

SCRAPE_S = 5.0


def test_a_cause_keeps_its_place_while_its_consequence_stands() -> None:
    full, queue = (
        CONCLUSIVE[cause_id].causes()[cause_id] for cause_id in ("kv_pressure", "queue_saturation")
    )
    tracker = CauseTracker(scale=1.0)
    tracker.update(NOW_S, [full, queue])
    kept = tracker.update(NOW_S + SCRAPE_S, [queue])
    assert [cause.id for cause in kept] == ["kv_pressure", "queue_saturation"]
    assert [cause.id for cause in tracker.update(NOW_S + 60, [queue])] == ["queue_saturation"]
    tracker.update(NOW_S + 65, [full, queue])
    ended = tracker.update(NOW_S + 70, [])
    assert [cause.id for cause in ended] == ["queue_saturation"], "nothing follows from it now"


@pytest.mark.parametrize("cause_id", ["queue_saturation", "prefill_interference"])
def test_a_cause_that_pauses_is_told_throughout_and_ends_in_the_end(cause_id: str) -> None:
    cause = CONCLUSIVE[cause_id].causes()[cause_id]
    tracker = CauseTracker(scale=1.0)
    shown: list[bool] = []
    for at in range(40):
        # Three scrapes of each nine for two minutes, then none.
        there = at % 9 < 3 and at < 24
        told = tracker.update(NOW_S + SCRAPE_S * at, [cause] if there else [])
        shown.append(bool(told))
    assert all(shown[1:24])
    assert not any(shown[30:])
