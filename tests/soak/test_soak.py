"""The soak programs, cut short: what they promise for months is tried for seconds here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.soak.growing import Growing, counters
from tests.soak.ill_targets import beside
from tests.soak.kills import kill_often
from tests.soak.power_loss import cut_often
from tests.soak.process import MIB
from tests.soak.servers import RECORDINGS
from tests.soak.triage import asked

KILLS = 3
HUGE_BYTES = 600 * MIB


def test_a_kill_costs_at_most_the_running_cycle(tmp_path: Path) -> None:
    # A busy machine must not take longer for a cycle than the time to the next.
    left = kill_often(tmp_path, KILLS, interval="1s")
    assert [loss.forgotten for loss in left] == [0] * KILLS
    assert max(loss.missing for loss in left) <= 1
    assert left[-1].cycles > 0, "they scraped before they were killed"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace records the writes")
def test_a_loss_of_power_costs_at_most_the_running_cycle(tmp_path: Path) -> None:
    outcome = cut_often(tmp_path, 4, cycles=9)
    assert outcome.kept, outcome


def test_hanging_targets_and_a_page_of_30_mb_delay_no_other() -> None:
    outcome = beside(well=5, hang=5, huge=1, interval_s=2.0, warm_s=2.0, for_s=6.5)
    assert outcome.well.due >= 5
    assert outcome.well.missed < outcome.well.due, "they are scraped beside those that hang"
    assert outcome.well.failed == 0
    assert outcome.ill["huge"].startswith("a page ")
    assert outcome.peak_bytes < HUGE_BYTES
    assert "Traceback" not in outcome.log


def test_answers_come_while_targets_are_scraped() -> None:
    answers = asked(per_s=50.0, for_s=2.0, warm_s=0.5)
    assert len(answers.took_s) == 100


@pytest.mark.parametrize("name", sorted(set(RECORDINGS)))
def test_a_recording_goes_on_from_turn_to_turn(name: str) -> None:
    growing = Growing(name)
    before: dict[str, float] = {}
    for step in range(0, 260, 13):
        values = counters(growing.page(step).decode())
        assert all(values.get(series, 0.0) >= value - 1e-6 for series, value in before.items())
        before = values


def test_growing_pages_are_made_once_a_turn() -> None:
    growing = Growing("healthy_light")
    page = growing.page(1_000)
    assert growing.page(1_000) is page
