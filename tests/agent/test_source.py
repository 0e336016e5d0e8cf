"""Pages whose samples say of what time they are."""

from __future__ import annotations

import pytest

from kneewatch.agent.captures import STALE_AFTER_S
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile

NOW_S = 1_795_219_600.0
ENGINE = '{engine="0",model_name="a"}'


def page(at_s: float | None, also: str = "") -> str:
    """An idle engine's page, its samples of a time."""
    at = "" if at_s is None else f" {at_s * 1000:.0f}"
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return "".join(f"vllm:{name}{ENGINE} 0{at}\n" for name in names) + also


def told(*pages: str) -> tuple[bool, str]:
    """Whether the last page was read, and the first cause, after pages 5 s from each other, the
    last at NOW_S."""
    stream, diagnoses = TargetStream("t", Profile(window_s=15.0), Limits()), []
    for number, body in enumerate(pages):
        diagnoses = stream.take(NOW_S + 5.0 * (number + 1 - len(pages)), body, "text/plain")
    (diagnosis,) = diagnoses
    return (
        diagnosis.was_read,
        f"{diagnosis.causes[0].id}: {diagnosis.causes[0].summary}" if diagnosis.causes else "",
    )


@pytest.mark.parametrize(
    ("at_s", "how_far"),
    [
        pytest.param(0.0, "20778.0 days before", id="1970"),
        pytest.param(NOW_S - 3600, "60 min before", id="an hour old"),
        pytest.param(NOW_S + 3600, "60 min after", id="an hour ahead"),
    ],
)
def test_a_page_of_another_time_is_not_told_as_healthy(at_s: float, how_far: str) -> None:
    was_read, why = told(page(at_s), page(at_s), page(at_s))
    assert not was_read
    assert why.startswith("metrics_missing: 3 scrapes in a row failed")
    assert f"has a timestamp {how_far} the scrape" in why


def test_one_old_sample_of_vllm_is_enough() -> None:
    body = page(None, f"vllm:num_preemptions_total{ENGINE} 0 1000\n")
    assert not told(body, body)[0]


@pytest.mark.parametrize("age_s", [0.0, STALE_AFTER_S - 15, 15 - STALE_AFTER_S])
def test_times_near_the_scrape_change_nothing(age_s: float) -> None:
    stamped = [page(NOW_S - age_s)] * 3
    assert told(*stamped) == told(*[page(None)] * 3)
    assert "carries" not in told(*stamped)[1]


def test_what_else_is_on_the_page_may_be_old() -> None:
    old = "container_start_time_seconds 5 1000\n"
    assert told(*[page(None, old)] * 3) == told(*[page(None)] * 3)


def test_a_recording_is_held_against_its_own_time() -> None:
    stream, then_s = TargetStream("t", Profile(window_s=15.0), Limits()), 1_000_000.0
    for t_s in (then_s, then_s + 5, then_s + 10):
        assert "carries" not in str(stream.replay(Entry(t_s, page(t_s))))
    (late,) = stream.replay(Entry(then_s + 4000, page(then_s)))
    assert "has a timestamp 67 min before" in late.causes[0].summary
