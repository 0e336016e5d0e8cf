"""TTFT and ITL P99 after a change, with a band: from what this server's own windows showed."""

from __future__ import annotations

from statistics import median

from msgspec.structs import replace

from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.test_own_steps import BUSY, LOADS, learned, page, recommended
from tests.recordings import LAB, diagnoses
from tests.tails import told, windows


def test_a_window_lies_in_the_band_predicted_from_the_others() -> None:
    """A window of 15 s has few requests, so its own P99 is noisy: the band says by how much."""
    names = ("loads", "slow_open", "slower_prefill", "few_seats")
    of = [each for name in names for each in told(windows(diagnoses(LAB / f"{name}.jsonl.gz")))]
    for key, near_ratio in (("itl_p99", 0.66), ("ttft_p99", 0.4)):
        mine = [each for each in of if each.key == key]
        assert len(mine) >= 60
        assert sum(each.is_inside for each in mine) >= 0.95 * len(mine)
        near = sum(1 / 1.3 <= each.said_s / each.was_s <= 1.3 for each in mine)
        assert near >= near_ratio * len(mine)
        widths = [each.high_s / each.low_s for each in mine]
        assert median(widths) <= 10, "wide enough to say nothing"


def test_a_target_is_compared_with_the_predicted_p99() -> None:
    pages = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in (*LOADS, *LOADS)]
    targets = Targets(itl_p99_s=0.15)
    growing = BUSY.but(itl_p99_s=0.4, waiting_slope_per_s=1.0)
    situation = replace(growing, targets=targets, curve=learned(*pages))
    fewer = recommended(situation)
    band = [fewer.predicted[f"itl_p99_{end}s"] for end in ("low_", "", "high_")]
    assert band == sorted(band)
    assert fewer.unmet == ("ITL P99 target of 150 ms",)
    assert "ttft_p99_s" not in fewer.predicted, "the queue grows: nobody knows its tail"


def test_no_p99_without_windows_of_such_a_batch() -> None:
    few = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in LOADS[:2]]
    assert "itl_p99_s" not in recommended(replace(BUSY, curve=learned(*few))).predicted
