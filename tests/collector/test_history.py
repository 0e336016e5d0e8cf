"""What a history keeps, and what makes it begin anew."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

import pytest

from kneewatch.collector.scrape_history import FRAMES_MAX, Column, Columns, History, Table
from kneewatch.collector.signals.expr import Gauge
from kneewatch.collector.window import Window
from tests.collector.histories import Handmade, Scraped
from tests.collector.name_pages import recorded
from tests.pages import (
    grown,
    multiprocess,
    recreated,
    restarted,
    with_values,
    without,
    without_process,
)

FIRST, NEXT = recorded("0.32.0-loaded"), recorded("0.32.0-loaded-next")
STARTED_S = 1_795_221_243.0


def rate(history: History, metric: str, *, range_s: float = 60.0) -> float | None:
    """A counter's rate up to the newest scrape."""
    return Window(history, now_s=history.times[-1], range_s=range_s).rate(metric)


# Restarts


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        pytest.param(
            FIRST,
            restarted(NEXT, STARTED_S + 100),
            "start time",
            id="process_start_time changed, though no counter fell",
        ),
        pytest.param(
            without_process(FIRST),
            without_process(recreated(NEXT, 100)),
            "start time",
            id="_created changed, though no counter fell",
        ),
        pytest.param(
            multiprocess(FIRST),
            multiprocess(grown(NEXT, 0.0)),
            "counters went back",
            id="no start time on the page (multiprocess): counters fell together",
        ),
    ],
)
def test_a_restart_is_told_and_begins_the_history_anew(before: str, after: str, how: str) -> None:
    scraped = Scraped()
    assert scraped.take(10.0, before) is None
    assert scraped.take(12.0, before) is None
    restart = scraped.take(14.0, after)
    assert restart is not None
    assert restart.t_s == 14.0
    assert how in restart.how
    assert scraped.history.restarts == 1
    assert scraped.history.times == [14.0]
    assert len(scraped.history.frames) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(FIRST, NEXT, id="same start time"),
        pytest.param(without_process(FIRST), without_process(NEXT), id="same _created"),
        pytest.param(multiprocess(FIRST), multiprocess(NEXT), id="neither on the page"),
        pytest.param(
            FIRST, grown(NEXT, 0.0), id="counters at zero, but the process says it is the same"
        ),
        pytest.param(
            FIRST, without_process(NEXT), id="the start time is gone: nothing to compare it with"
        ),
        pytest.param(
            multiprocess(FIRST),
            multiprocess(with_values(NEXT, {"generation_tokens_total": 3})),
            id="one counter fell",
        ),
    ],
)
def test_what_is_no_restart(before: str, after: str) -> None:
    scraped = Scraped()
    scraped.take(10.0, before)
    assert scraped.take(12.0, after) is None
    assert scraped.history.restarts == 0
    assert scraped.history.times == [10.0, 12.0]


@pytest.mark.parametrize(
    ("fallen", "live", "restart"),
    [
        pytest.param(1, 1, False, id="the only one"),
        pytest.param(2, 2, False, id="both of two"),
        pytest.param(1, 3, False, id="a third"),
        pytest.param(2, 3, True, id="two thirds"),
        pytest.param(2, 4, True, id="half"),
        pytest.param(2, 5, False, id="less than half"),
    ],
)
def test_counters_must_fall_together(fallen: int, live: int, *, restart: bool) -> None:
    handmade = Handmade()
    idle = {f"idle{n}": 0.0 for n in range(20)}
    handmade.take(1.0, {f"c{n}": 5.0 for n in range(live)} | idle)
    after = {f"c{n}": 1.0 if n < fallen else 5.0 for n in range(live)} | idle
    assert (handmade.take(2.0, after) is not None) == restart


def test_a_single_counter_that_was_reset_counts_from_zero() -> None:
    scraped = Scraped()
    scraped.take(0.0, multiprocess(with_values(FIRST, {"generation_tokens_total": 1000})))
    scraped.take(10.0, multiprocess(with_values(NEXT, {"generation_tokens_total": 1100})))
    scraped.take(20.0, multiprocess(with_values(NEXT, {"generation_tokens_total": 50})))
    assert scraped.history.restarts == 0
    assert rate(scraped.history, "generation_tokens", range_s=20.0) == pytest.approx(150 / 20)


def test_no_window_spans_a_restart() -> None:
    scraped = Scraped()
    for t_s in (0.0, 2.0, 4.0):
        scraped.take(t_s, FIRST)
    for t_s in (6.0, 8.0, 10.0):
        scraped.take(t_s, restarted(grown(FIRST, t_s), STARTED_S + 5))
        window = Window(scraped.history, now_s=t_s, range_s=1000.0)
        assert [frame.t_s for frame in window.frames] == [t for t in (6.0, 8.0, 10.0) if t <= t_s]
        assert window.scrapes > 1 or window.rate("generation_tokens") is None
    assert scraped.history.first_s == 6.0


def test_each_of_several_restarts_is_told() -> None:
    scraped = Scraped()
    starts = [scraped.take(float(n), restarted(FIRST, STARTED_S + n // 2)) for n in range(6)]
    assert [restart is not None for restart in starts] == [False, False, True, False, True, False]
    assert scraped.history.restarts == 2


# Times


@pytest.mark.parametrize(
    "t_s",
    [
        pytest.param(100.0, id="repeated"),
        pytest.param(99.5, id="half a second back"),
        pytest.param(math.nan, id="no number"),
        pytest.param(-math.inf, id="before all time"),
    ],
)
def test_a_scrape_that_is_not_newer_is_dropped_and_counted(t_s: float) -> None:
    scraped = Scraped()
    scraped.take(98.0, FIRST)
    scraped.take(100.0, NEXT)
    assert scraped.take(t_s, restarted(FIRST, STARTED_S + 9)) is None
    assert scraped.history.out_of_order == 1
    assert scraped.history.clock_steps == 0
    assert scraped.history.times == [98.0, 100.0]
    scraped.take(102.0, grown(NEXT, 1.01))
    assert scraped.history.times == [98.0, 100.0, 102.0]
    assert scraped.history.restarts == 0


def test_a_clock_set_back_begins_the_history_anew_and_is_no_restart() -> None:
    scraped = Scraped()
    scraped.take(5_000.0, FIRST)
    scraped.take(5_002.0, NEXT)
    assert scraped.take(1_400.0, grown(NEXT, 1.1)) is None
    assert scraped.history.times == [1_400.0]
    assert (scraped.history.clock_steps, scraped.history.out_of_order) == (1, 0)
    assert scraped.history.restarts == 0
    scraped.take(1_402.0, grown(NEXT, 1.2))
    assert (rate(scraped.history, "generation_tokens") or 0) > 0


def test_a_restart_while_the_clock_is_set_back_is_not_missed_later() -> None:
    scraped = Scraped()
    scraped.take(5_000.0, FIRST)
    scraped.take(1_400.0, restarted(FIRST, STARTED_S + 100))
    assert scraped.take(1_402.0, restarted(FIRST, STARTED_S + 100)) is None
    assert scraped.take(1_404.0, restarted(FIRST, STARTED_S + 200)) is not None


def test_old_scrapes_are_forgotten_but_never_less_than_asked_for_is_kept() -> None:
    handmade = Handmade(history=History(keep_s=60.0))
    for second in range(1_000):
        handmade.take(float(second), {"c": float(second)})
        times = handmade.history.times
        assert len(times) == len(handmade.history.frames)
        assert times[-1] - times[0] <= 1.25 * 60
        assert times[0] == 0 or times[-1] - times[0] >= 60
    assert rate(handmade.history, "c") == pytest.approx(1.0)


def test_all_scrapes_but_the_newest_are_packed() -> None:
    scraped = Scraped()
    for at in range(3):
        scraped.take(100.0 + at, FIRST if at % 2 else NEXT)
    *packed, newest = scraped.history.frames
    assert all(isinstance(row, array) for f in packed for row in (f.counters, f.gauges))
    assert isinstance(newest.counters, tuple)


def test_a_short_interval_does_not_fill_the_memory() -> None:
    handmade = Handmade()
    for number in range(FRAMES_MAX + 500):
        handmade.take(number / 1000, {"c": float(number)})
    assert len(handmade.history.frames) == len(handmade.history.times) <= FRAMES_MAX
    assert handmade.history.times[-1] == (FRAMES_MAX + 499) / 1000


# Series that come and go


def test_a_series_that_appears_midway_counts_from_there() -> None:
    handmade = Handmade()
    for t_s in range(0, 60, 10):
        late = {"late": 100.0 + t_s} if t_s >= 30 else {}
        handmade.take(float(t_s), {"always": 2.0 * t_s} | late)
    assert rate(handmade.history, "late", range_s=50.0) == pytest.approx(25 / 50)
    assert rate(handmade.history, "always", range_s=50.0) == pytest.approx(2.0)


def test_a_series_that_has_just_appeared_is_unknown() -> None:
    handmade = Handmade()
    handmade.take(0.0, {"always": 0.0})
    handmade.take(10.0, {"always": 1.0, "late": 500.0})
    assert rate(handmade.history, "late") is None
    assert rate(handmade.history, "always") is not None


def test_a_series_that_vanished_is_told_from_one_that_is_there() -> None:
    handmade = Handmade(bounds=(1.0, math.inf))
    history = handmade.history
    assert not history.columns.shows("always")
    for t_s in (0.0, 10.0):
        handmade.take(t_s, {"always": t_s, "early": t_s}, {"gauge": 1.0}, (1.0, 2.0))
    assert all(map(history.columns.shows, ("always", "early", "gauge", "histogram")))
    handmade.take(20.0, {"always": 20.0})
    assert history.columns.shows("always")
    assert not any(map(history.columns.shows, ("early", "gauge", "histogram", "never")))
    assert all(map(history.columns.has, ("always", "early", "gauge", "histogram")))
    newest = Window(history, now_s=20.0, range_s=10.0)
    gauge = Gauge("gauge").bind(history.columns)
    assert gauge(newest) is None
    assert newest.rate("early") is None
    assert rate(history, "early", range_s=20.0) == pytest.approx(1.0), "what the window still holds"
    handmade.take(30.0, {"always": 30.0, "early": 30.0}, {"gauge": 2.0})
    assert history.columns.shows("early")
    assert gauge(Window(history, now_s=30.0, range_s=10.0)) == 2.0


def test_the_columns_are_other_ones_whenever_what_is_known_does() -> None:
    handmade = Handmade()
    seen: list[Columns] = []
    for t_s, names in enumerate(["a", "a", "ab", "ab", "b", "ab"]):
        handmade.take(float(t_s), dict.fromkeys(names, 1.0))
        seen.append(handmade.history.columns)
    changed = [after is not before for before, after in pairwise(seen)]
    assert changed == [False, True, False, True, True]


def test_targets_whose_pages_have_the_same_series_share_columns_until_these_differ() -> None:
    first, second = Scraped(), Scraped()
    for t_s, body in ((0.0, FIRST), (10.0, NEXT)):
        first.take(t_s, body)
        second.take(t_s, body)
    assert first.history.columns is second.history.columns
    more = NEXT.replace("# TYPE", 'vllm:late_total{engine="0",model_name="tiny"} 7\n# TYPE', 1)
    second.take(20.0, more)
    first.take(20.0, NEXT)
    assert first.history.columns is not second.history.columns
    assert len(first.history.frames[-1].counters) == len(first.history.counters)
    assert rate(first.history, "generation_tokens") == rate(second.history, "generation_tokens")


def test_ever_changing_label_sets_do_not_pile_up() -> None:
    handmade = Handmade(history=History(keep_s=20.0))
    lasting = [f"c{n}" for n in range(10)]
    history = handmade.history
    for scrape in range(1_200):
        passing = {f"request-{scrape}": 1.0, f"request-{scrape + 1}": 1.0}
        handmade.take(float(scrape), dict.fromkeys(lasting, float(scrape)) | passing)
        assert len(history.counters) <= 2 * 12 + 500 + 12
        assert {len(frame.counters) for frame in history.frames} == {len(history.counters)}
    assert rate(history, "c0", range_s=10.0) == pytest.approx(1.0)
    assert not history.columns.has("request-0")
    assert history.restarts == 0


def test_info_labels_are_those_of_the_page_at_hand() -> None:
    scraped = Scraped()
    scraped.take(0.0, FIRST)
    assert scraped.history.info["cache_config_info"]["block_size"] == "32"
    scraped.take(2.0, FIRST.replace('block_size="32"', 'block_size="64"'))
    assert scraped.history.info["cache_config_info"]["block_size"] == "64"
    scraped.take(4.0, without(FIRST, "cache_config_info"))
    assert "cache_config_info" not in scraped.history.info


def test_a_value_that_nothing_can_reach_is_not_believed() -> None:
    for metric in ("num_requests_running", "unheard_of"):
        table = Table({Column(metric, ()): 0})
        assert table.impossible((1e308,)) == [0]
        assert table.impossible((-1e308,)) == [0]
        assert table.impossible((1e18,)) == []
