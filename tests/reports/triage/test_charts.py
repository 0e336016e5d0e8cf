"""Charts: scales that end at round numbers, bounds at their height, words for those who listen."""

from __future__ import annotations

import math
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.reports.triage.charts import Axis, Chart, ceiling, chart
from kneewatch.reports.triage.engine import EnginePart
from kneewatch.reports.triage.view_model import standings
from kneewatch.rules.formatting import quantity
from tests.reports.triage.views import cascade

AXIS = Axis(1000.0, 1100.0)


def made(key: str, values: list[float], *bounds: float, moment_s: float = 1100.0) -> Chart:
    times = [1000.0 + 100 * n / max(1, len(values) - 1) for n in range(len(values))]
    drawn = chart(
        key,
        times,
        values,
        AXIS,
        bounds=[(bound, "bound") for bound in bounds],
        held=(1050.0, None),
        moment_s=moment_s,
    )
    assert drawn is not None
    return drawn


def test_a_chart() -> None:
    drawn = made("ttft_p99_s", [0.0, 1.0, 2.0], 0.5)
    assert drawn.top == "2.5 s"
    assert drawn.line == "M0,100.0L500,60.0L1000,20.0"
    assert drawn.area == "M0,100.0L500,60.0L1000,20.0L1000,100.0L0,100.0Z"
    assert [(y, words) for y, words, _ in drawn.bounds] == [(80.0, "bound 500 ms")]
    assert drawn.held == (50.0, 50.0)
    assert drawn.last == pytest.approx((100.0, 20.0))
    assert drawn.moment_x is None
    assert drawn.desc == (
        "From 0 ms to 2.0 s in 100 s to 00:18:20 UTC; 2.0 s at 00:18:20 UTC; bound 500 ms."
    )


def test_a_gap_is_no_line() -> None:
    assert made("running", [1.0, nan, 1.0, 1.0]).line.count("M") == 2


def test_a_lone_point_is_a_dot() -> None:
    assert made("running", [1.0]).line == "M0,16.7h0"


def test_a_bound_above_all_values_is_inside_the_chart() -> None:
    drawn = made("running", [1.0, 2.0], 100.0)
    assert 0 < drawn.bounds[0][0] < 20


def test_a_past_moment_has_its_mark_and_its_value() -> None:
    drawn = made("running", [1.0, 2.0, 3.0, 4.0, 5.0], moment_s=1060.0)
    assert drawn.moment_x == 60.0
    assert drawn.last[0] == 50.0, "the newest value known at that moment"


def test_the_dot_is_the_newest_value_and_not_the_highest_of_its_column() -> None:
    drawn = made("running", [*[10.0, 100.0] * 500, 25.0])
    assert drawn.top == "120"
    assert drawn.last == pytest.approx((100.0, 100 * (1 - 25 / 120)))
    assert "; 25 at 00:18:20 UTC" in drawn.desc


@pytest.mark.parametrize("stored", [[0.9, 0.9, 0.3], [0.9, 0.3, math.nan]])
def test_the_dot_is_the_value_beside_the_chart_where_the_store_lags_behind(
    stored: list[float],
) -> None:
    shown = cascade()
    (target,) = shown.targets
    (engine,) = target.engines
    now_s, used = engine.diagnosis.t_s, engine.diagnosis.values["kv_usage_ratio"]
    assert used is not None
    times = [now_s - 30, now_s - 20, now_s - 10]
    engine = replace(engine, times=times, series={"kv_usage_ratio": stored})
    part = EnginePart(
        1, standings(target, shown)[0], engine, Axis(now_s - 60, now_s + 1), shown.moment_s
    )
    label, value, *_, drawn = part.vitals()[0]
    assert label == "KV cache used"
    assert value == quantity("kv_usage_ratio", used)
    assert drawn is not None
    assert drawn.last == pytest.approx((100 * 60 / 61, 100 * (1 - used)))


def test_nothing_known_is_no_chart() -> None:
    assert chart("x", [1050.0], (), AXIS, moment_s=1100.0) is None
    assert chart("x", [1050.0], [nan], AXIS, moment_s=1100.0) is None
    assert chart("x", [5.0], [1.0], AXIS, moment_s=1100.0) is None


def test_a_signal_that_is_always_zero_has_no_made_up_scale() -> None:
    assert made("waiting", [0.0, 0.0]).top == ""
    assert made("waiting", [0.0, 5e-324]).top == ""


def test_values_below_zero_are_drawn() -> None:
    drawn = made("waiting_slope_per_s", [-1.0, 1.0])
    assert drawn.line == "M0,100.0L1000,9.1"
    assert drawn.area == "M0,100.0L1000,9.1L1000,54.5L0,54.5Z", "from nothing"


@pytest.mark.parametrize(
    ("value", "key", "top"),
    [
        (0.0, "", 0.0), (1.0, "", 1.0), (1.01, "", 1.2), (77.0, "", 80.0), (0.023, "", 0.025),
        (0.94, "kv_usage_ratio", 1.0), (1.04, "kv_usage_ratio", 1.0), (0.3, "kv_usage_ratio", 0.3),
        (9.5, "", 10.0),
    ],
)  # fmt: skip
def test_round_numbers(value: float, key: str, top: float) -> None:
    assert ceiling(value, of=key) == pytest.approx(top)


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50),
    st.lists(st.floats(-1e9, 1e9), max_size=3),
)
def test_everything_lies_inside(values: list[float], bounds: list[float]) -> None:
    drawn = made("running", values, *bounds)
    assert all(-0.1 <= y <= 100.1 for y, *_ in drawn.bounds)
    pairs = drawn.line.replace("M", "L").replace("h0", "").split("L")
    heights = [float(pair.split(",")[1]) for pair in pairs if pair.strip()]
    assert all(-0.1 <= height <= 100.1 for height in heights)
