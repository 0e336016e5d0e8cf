"""Rates, histograms and gauges over a window: one arithmetic, however the history was filled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from kneewatch.collector.signals.expr import (
    Expr,
    Gauge,
    InfoChanges,
    OverTime,
    Rate,
    Slope,
    info_names,
    info_number,
)
from kneewatch.collector.window import HALF_MS_S, LOOKBACK_S, Window, extrapolated_rate
from tests.collector.histories import Handmade, Scraped
from tests.collector.name_pages import recorded
from tests.examples import examples

INF = math.inf
BOUNDS = (0.1, 0.5, 2.5, INF)
START_S = 1_795_000_000.0


def value(expr: Expr, window: Window) -> float | None:
    """An expression's value, bound anew."""
    return expr.bind(window.history.columns)(window)


def part_rate(window: Window, metric: str, part: str) -> float | None:
    """Per-second rate of a histogram's sum or count."""
    return window.total_rate(window.history.columns.counter_columns(metric, (), part))


class Scrape(Struct, frozen=True):
    """One scrape of two counters and a histogram; None where the page lacks it."""

    after_s: float
    counters: tuple[float | None, float | None]
    buckets: tuple[float, ...] | None


@st.composite
def runs(draw: st.DrawFn) -> list[Scrape]:
    """Scrapes at any interval: counters that grow, stand still, are reset or are gone."""
    scrapes: list[Scrape] = []
    counters, buckets = [draw(st.integers(0, 10**6)), 0], [0] * len(BOUNDS)
    step = st.sampled_from((0, 0, 1, 7, 1000))
    for _ in range(draw(st.integers(1, 14))):
        for at, fate in enumerate(draw(st.tuples(*[st.integers(0, 9)] * 2))):
            counters[at] = draw(step) if fate == 0 else counters[at] + draw(step)
        if draw(st.integers(0, 9)) == 0:
            buckets = [0] * len(BOUNDS)
        at = draw(st.integers(0, len(BOUNDS)))
        buckets = [count + (place >= at) * draw(step) for place, count in enumerate(buckets)]
        shown = draw(st.tuples(*[st.integers(0, 7)] * 3))
        scrapes.append(
            Scrape(
                draw(st.sampled_from((1.0, 2.0, 2.0, 2.0, 2.001, 15.0, 90.0))),
                (
                    float(counters[0]) if shown[0] else None,
                    float(counters[1]) if shown[1] else None,
                ),
                tuple(map(float, buckets)) if shown[2] else None,
            )
        )
    return scrapes


def filled(scrapes: Sequence[Scrape]) -> tuple[Handmade, dict[str, list[tuple[float, float]]]]:
    """A history of the scrapes, and the raw points of each series beside it."""
    handmade = Handmade(bounds=BOUNDS)
    points: dict[str, list[tuple[float, float]]] = {}
    t_s = START_S
    for scrape in scrapes:
        t_s = round(t_s + scrape.after_s, 3)
        pairs = zip("ab", scrape.counters, strict=True)
        counters = {name: value for name, value in pairs if value is not None}
        handmade.take(t_s, counters, {"up": 1.0}, scrape.buckets, start_s=1.0)
        for name, value in counters.items():
            points.setdefault(name, []).append((t_s, value))
        for bound, value in zip(BOUNDS, scrape.buckets or (), strict=False):
            points.setdefault(repr(bound), []).append((t_s, value))
    return handmade, points


@examples(300)
@given(
    scrapes=runs(),
    range_s=st.sampled_from((1.0, 3.0, 10.0, 60.0, 300.0)),
    later_s=st.sampled_from((-20.0, -2.0, 0.0, 0.5, 7.0, 100.0)),
)
def test_a_window_equals_the_rate_of_the_raw_points(
    scrapes: list[Scrape], range_s: float, later_s: float
) -> None:
    handmade, points = filled(scrapes)
    now_s = handmade.history.times[-1] + later_s
    window = Window(handmade.history, now_s=now_s, range_s=range_s)

    def expected(name: str) -> float | None:
        since_s = now_s - range_s - HALF_MS_S
        inside = [point for point in points.get(name, []) if since_s <= point[0] <= now_s]
        return extrapolated_rate(inside, now_s=now_s, range_s=range_s)

    for name in "ab":
        assert window.rate(name) == pytest.approx(expected(name))
        assert value(Rate(name), window) == window.rate(name)
    buckets = window.buckets("histogram")
    rates = [expected(repr(bound)) for bound in BOUNDS]
    if buckets is None:
        assert rates[-1] is None
    else:
        assert buckets.bounds == BOUNDS
        assert list(buckets.rates_per_s) == pytest.approx(rates)
        assert part_rate(window, "histogram", "count") == pytest.approx(rates[-1])
    for at, rate in enumerate(window.rates):
        assert rate is None or rate == window.total_rate((at,)), "all at once as one by one"
    few = Window(handmade.history, now_s=now_s, range_s=range_s, few=True)
    assert few.buckets("histogram") == buckets
    assert [value(Rate(name), few) for name in "ab"] == [window.rate(name) for name in "ab"]


@examples(100)
@given(scrapes=runs(), range_s=st.sampled_from((3.0, 10.0, 60.0, 300.0)))
def test_no_rate_is_negative_or_no_number(scrapes: list[Scrape], range_s: float) -> None:
    handmade, _ = filled(scrapes)
    window = Window(handmade.history, now_s=handmade.history.times[-1], range_s=range_s)
    buckets = window.buckets("histogram")
    rates = [window.rate("a"), window.rate("b"), part_rate(window, "histogram", "count")]
    rates += buckets.rates_per_s if buckets else ()
    assert all(rate is None or 0 <= rate < INF for rate in rates)


@pytest.mark.parametrize(
    ("points", "now_s", "range_s", "expected"),
    [
        pytest.param([(0, 0), (60, 60)], 60, 60, 1.0, id="the window is covered: increase / range"),
        pytest.param([(10, 20), (50, 60)], 60, 60, 40 * 60 / 40 / 60, id="reaches both edges"),
        pytest.param(
            [(20, 0), (30, 10), (40, 20)], 60, 60, 20 * 25 / 20 / 60,
            id="far from the right edge: half an interval further; starts at zero: none before it",
        ),
        pytest.param(
            [(20, 100), (30, 110), (40, 120)], 60, 60, 20 * 30 / 20 / 60,
            id="far from both edges: half an interval on each side",
        ),
        pytest.param([(0, 90), (30, 100), (60, 5)], 60, 60, 15 / 60, id="a reset counts from zero"),
        pytest.param([(0, 7), (60, 7)], 60, 60, 0.0, id="stands still"),
        pytest.param([(30, 7)], 60, 60, None, id="one point"),
        pytest.param([], 60, 60, None, id="no point"),
    ],
)  # fmt: skip
def test_rates_worked_by_hand(
    points: list[tuple[float, float]], now_s: float, range_s: float, expected: float | None
) -> None:
    assert extrapolated_rate(points, now_s=now_s, range_s=range_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param((math.nan, 5.0), None, id="NaN at first"),
        pytest.param((5.0, math.nan), None, id="NaN at last"),
        pytest.param((math.nan, math.nan), None, id="NaN throughout"),
        pytest.param((INF, INF), None, id="infinite throughout"),
        pytest.param((-5.0, -5.0), 0.0, id="negative and at rest"),
    ],
)
def test_what_no_counter_shows(shown: tuple[float, float], expected: float | None) -> None:
    handmade = Handmade()
    for number, count in enumerate(shown):
        handmade.take(10.0 * number, {"a": count, "b": 10.0 * number + 100})
    window = Window(handmade.history, now_s=10.0, range_s=10.0)
    assert value(Rate("a"), window) == window.rate("a") == expected
    assert value(Rate("b"), window) == window.rate("b") == 1.0


def test_series_of_one_metric_are_summed_or_picked_by_label() -> None:
    scraped = Scraped()
    scraped.take(0.0, recorded("0.32.0-loaded"))
    scraped.take(10.0, recorded("0.32.0-loaded-next"))
    window = Window(scraped.history, now_s=10.0, range_s=10.0)
    assert window.rate("request_success") == pytest.approx(3.0)
    assert window.rate("request_success", (("finished_reason", "length"),)) == pytest.approx(3.0)
    assert window.rate("request_success", (("finished_reason", "stop"),)) == 0.0
    assert window.rate("request_success", (("finished_reason", "nonsense"),)) is None
    assert window.rate("nonsense") is None
    assert part_rate(window, "time_to_first_token_seconds", "count") == pytest.approx(3.0)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_server_without_traffic_has_no_latency(count: int) -> None:
    handmade = Handmade(bounds=BOUNDS)
    for number in range(count):
        handmade.take(10.0 * number, {"a": 5.0}, buckets=(1.0, 2.0, 3.0, 4.0))
    window = Window(handmade.history, now_s=10.0 * (count - 1), range_s=60.0)
    buckets = window.buckets("histogram")
    assert buckets is not None
    assert set(buckets.rates_per_s) == {0.0}
    assert buckets.quantile(0.5) is None
    assert buckets.above_per_s(0.5) == 0.0
    assert window.rate("a") == 0.0


def test_a_histogram_that_has_just_appeared_is_unknown() -> None:
    handmade = Handmade(bounds=BOUNDS)
    handmade.take(0.0, {"a": 1.0})
    handmade.take(10.0, {"a": 2.0}, buckets=(1.0, 2.0, 3.0, 4.0))
    window = Window(handmade.history, now_s=10.0, range_s=60.0)
    assert window.buckets("histogram") is None
    assert part_rate(window, "histogram", "count") is None
    assert window.buckets("nonsense") is None


@pytest.mark.parametrize("scrapes", [0, 1])
def test_fewer_than_two_scrapes_give_no_rate(scrapes: int) -> None:
    handmade = Handmade(bounds=BOUNDS)
    handmade.take(0.0, {"a": 1.0}, {"g": 2.0}, (1.0, 2.0, 3.0, 4.0))
    handmade.take(10.0, {"a": 1.0}, {"g": 3.0}, (1.0, 2.0, 3.0, 4.0))
    window = Window(handmade.history, now_s=10.0 * scrapes - 5.0, range_s=10.0)
    assert window.scrapes == scrapes
    assert window.rate("a") is None
    assert part_rate(window, "histogram", "count") is None
    assert window.buckets("histogram") is None
    assert value(Gauge("g"), window) == (2.0 if scrapes else None)


# Gauges


def test_a_gauge_is_what_the_newest_scrape_says() -> None:
    handmade = Handmade()
    for t_s, shown in ((0.0, 5.0), (10.0, 7.0), (20.0, math.nan)):
        handmade.take(t_s, gauges={"g": shown})
    history = handmade.history
    columns = history.columns.gauge_columns("g")
    assert value(Gauge("g"), Window(history, now_s=9.0, range_s=60.0)) == 5.0
    assert value(Gauge("g"), Window(history, now_s=19.0, range_s=60.0)) == 7.0
    last, short = (Window(history, now_s=20.0, range_s=range_s) for range_s in (60.0, 15.0))
    assert value(Gauge("g"), last) is None, "NaN is no value, and an older value is none either"
    assert last.newest(columns) == []
    assert last.slopes(columns) == [0.2]
    (at,) = columns
    assert last.over_time(at) == [5.0, 7.0]
    assert short.slopes(columns) == []
    assert short.over_time(at) == [7.0]
    assert value(Gauge("nonsense"), last) is None
    assert value(OverTime("nonsense", "max"), last) is None
    assert value(Slope("nonsense"), last) is None


def test_a_gauge_grows_stale() -> None:
    handmade = Handmade()
    handmade.take(1_000.0, gauges={"g": 5.0})
    still = Window(handmade.history, now_s=1_000.0 + LOOKBACK_S - 1, range_s=60.0)
    assert value(Gauge("g"), still) == 5.0
    stale = Window(handmade.history, now_s=1_000.0 + LOOKBACK_S, range_s=60.0)
    assert value(Gauge("g"), stale) is None


def test_the_series_of_a_gauge_are_summed_or_picked_by_label() -> None:
    scraped = Scraped()
    page = recorded("0.32.0-loaded")
    deferred = page.replace('reason="deferred"} 0.0', 'reason="deferred"} 3.0')
    scraped.take(0.0, deferred.replace('reason="capacity"} 0.0', 'reason="capacity"} 4.0'))
    window = Window(scraped.history, now_s=0.0, range_s=60.0)
    by_reason = "num_requests_waiting_by_reason"
    assert value(Gauge(by_reason), window) == 7.0
    assert sorted(window.newest(scraped.history.columns.gauge_columns(by_reason))) == [3.0, 4.0]
    assert value(Gauge(by_reason, (("reason", "deferred"),)), window) == 3.0
    assert value(Gauge(by_reason, (("reason", "nonsense"),)), window) is None


def test_of_an_info_metric_the_series_with_the_greatest_value_is_current() -> None:
    scraped = Scraped()
    line = 'vllm:lora_requests_info{{running_lora_adapters="{}",max_lora="2"}} {}\n'
    page = recorded("0.32.0-loaded")
    rows = "".join(line.format(name, t_s) for name, t_s in (("a", 50), ("b,d", 90), ("", 70)))
    scraped.take(100.0, page + rows)
    window = Window(scraped.history, now_s=100.0, range_s=40.0)
    info = "lora_requests_info"
    assert value(info_names(info, "running_lora_adapters"), window) == 2.0
    assert value(info_names(info, "nonsense"), window) is None
    assert value(info_number(info, "max_lora"), window) == 2.0
    assert value(info_number(info, "running_lora_adapters"), window) is None
    assert value(info_number(info, "nonsense"), window) is None
    assert value(InfoChanges(info), window) == 2 / 40
    assert value(info_names("nonsense", "running_lora_adapters"), window) is None
    assert value(InfoChanges("nonsense"), window) is None
