"""Figures, changes and moments in words."""

from __future__ import annotations

import math
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from kneewatch.diagnose.capacity import Range
from kneewatch.reports.weekly.figures import Period, ReportedFlag, Trend, UnknownSignal
from kneewatch.reports.weekly.guide_tables import kv_metrics, monitoring
from kneewatch.reports.weekly.incidents import unit_of
from kneewatch.reports.weekly.page import formatting
from kneewatch.reports.weekly.page.formatting import Calendar, size_verdict
from kneewatch.reports.weekly.page.html import unknown_groups
from kneewatch.rules.formatting import as_sentence, plural, stamp
from kneewatch.rules.library import RULES


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "s", "unknown"),
        (math.nan, "s", "unknown"),
        (math.inf, "usd", "unknown"),
        (0.03512, "s", "35 ms"),
        (0.956, "ratio", "96%"),
        (0.013, "ratio_per_s", "1.3%/s"),
        (1.34, "per_s", "1.34/s"),
        (2_061_000.0, "tokens", "2,061,000 tokens"),
        (2100.0, "tokens_per_s", "2,100 tokens/s"),
        (80 * 1024.0**3, "bytes", "80 GiB"),
        (2688.4, "usd", "2,688 USD"),
        (1.5, "usd", "1.50 USD"),
        (0.0, "usd", "0 USD"),
        (0.51, "usd", "0.51 USD"),
        (0.004, "usd", "under 0.01 USD"),
        (12.0, "usd_per_hour", "12.00 USD/h"),
        (1.84, "usd_per_million_tokens", "1.84 USD per million tokens"),
        (1.0, "gpus", "1 GPU"),
        (8.0, "gpus", "8 GPUs"),
        (3.4, "", "3.4"),
        (7.0, "strange_unit", "7 strange unit"),
    ],
)
def test_a_value_has_its_unit(value: float | None, unit: str, words: str) -> None:
    assert formatting.with_unit(value, unit) == words


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.0, "100%"), (0.99996, "99.99%"), (0.999, "99.9%"), (0.99, "99%"), (0.978, "98%"),
     (0.0, "0%"), (None, "unknown")],
)  # fmt: skip
def test_only_all_of_it_is_a_hundred_percent(ratio: float | None, words: str) -> None:
    assert formatting.share(ratio) == words


@pytest.mark.parametrize(
    ("trend", "words", "tone", "arrow"),
    [
        (Trend("k", "n", "s", 4.21, 1.32, 0.1, "up", good=False), "up, worse", "worse", "▲"),
        (Trend("k", "n", "s", 1.0, 1.32, 0.1, "down", good=True), "down, better", "better", "▼"),
        (Trend("k", "n", "s", 1.0, 1.32, 0.1, "down"), "down", "quiet", "▼"),
        (Trend("k", "n", "s", 1.3, 1.32, 0.1, "same"), "", "quiet", ""),
        (Trend("k", "n", "s", 1.3, 1.32), "", "quiet", ""),
        (Trend("k", "n", "s", 1.3, 1.32, 0.1, "sideways", good=True), "", "quiet", ""),
    ],
)
def test_a_change_is_told_where_there_is_one(
    trend: Trend, words: str, tone: str, arrow: str
) -> None:
    assert formatting.change(trend) == words
    assert formatting.tone(trend) == tone
    assert formatting.arrow(trend) == arrow


def test_other_words() -> None:
    assert formatting.spread(Range(37, 41, 46), "") == "41 (37 to 46)"
    assert formatting.spread(Range(15, 15, 15), "per_s") == "15/s"
    assert formatting.spread(None, "") == "unknown"
    assert formatting.flag(ReportedFlag("--a", "1", "2")) == "--a 2 (now 1)"
    assert formatting.flag(ReportedFlag("--a", "", "2")) == "--a 2"
    assert formatting.flag(ReportedFlag("--a", "1", "")) == "drop --a"
    assert formatting.points(-0.21, "ratio") == "\N{MINUS SIGN}21 points"
    assert formatting.points(2.83, "s") == "+283%"
    assert formatting.saved(-12.0, "usd_per_hour") == "costs 12.00 USD/h"
    assert formatting.saved(0.0, "usd") == "no change in cost"
    assert formatting.with_unit(42.3, unit_of("backlog_requests")) == "42 requests"
    assert formatting.spent(2.2) == "220%"
    assert formatting.spent(26.58) == "27x the budget"
    assert formatting.with_unit(0.00527, "gpu_hours") == "0.316 GPU-minutes"
    assert as_sentence("no GPU source") == "No GPU source."
    assert as_sentence("vllm:x is missing") == "vllm:x is missing."
    assert as_sentence("--enable-lora is set.") == "--enable-lora is set."
    assert as_sentence("") == ""
    assert size_verdict("too small", "too small: 4 replicas") == ("Too small", "4 replicas.")
    assert size_verdict("nonsense", "not certain: why") == ("Unknown", "Not certain: why.")
    assert formatting.request_count(9.17) == "9 requests"
    assert formatting.request_count(0.2) == "under 1 request"
    assert formatting.request_count(None) == "unknown"
    assert plural(1, "day") == "1 day"
    assert plural(1200, "day") == "1,200 days"


def at(
    year: int, month: int, day: int, hour: int = 0, minute: int = 0, *, zone: str = "Europe/Berlin"
) -> float:
    return datetime(year, month, day, hour, minute, tzinfo=ZoneInfo(zone)).timestamp()


def calendar(start_s: float, end_s: float, *, days: int = 7) -> Calendar:
    return Calendar("Europe/Berlin", Period(start_s, end_s, end_s - start_s, days))


def test_moments_are_those_of_the_time_zone() -> None:
    week = calendar(at(2026, 11, 9), at(2026, 11, 16))
    assert week.title == "Mon 9 Nov to Sun 15 Nov 2026"
    assert calendar(at(2026, 12, 28), at(2027, 1, 4)).title == "Mon 28 Dec 2026 to Sun 3 Jan 2027"
    assert week.moment(at(2026, 11, 10, 14, 3)) == "Tue 10 Nov, 14:03"
    assert week.stretch(at(2026, 11, 10, 14), at(2026, 11, 10, 15)) == "Tue 10 Nov, 14:00 to 15:00"
    assert week.stretch(at(2026, 11, 10, 23), at(2026, 11, 11, 1)) == (
        "Tue 10 Nov, 23:00 to Wed 11 Nov, 01:00"
    )
    assert week.stretch(at(2026, 11, 10, 14), at(2026, 11, 10, 14, 1)) == (
        "Tue 10 Nov, 14:00:00 to 14:01:00"
    )
    assert (week.now, week.before) == ("this week", "last week")
    assert stamp(at(2026, 11, 9)) == "2026-11-08T23:00:00Z"


def test_a_period_that_does_not_begin_at_midnight_is_told_by_its_moments() -> None:
    some = calendar(at(2026, 11, 9, 6), at(2026, 11, 9, 18), days=1)
    assert some.title == "Mon 9 Nov 2026, 06:00 to 18:00"
    assert (some.now, some.before) == ("this period", "the period before")
    assert some.length == "12.0 h"


def test_a_part_of_a_day_is_not_told_as_one() -> None:
    assert calendar(at(2026, 11, 14, 12), at(2026, 11, 16), days=2).length == "36.0 h"
    assert calendar(at(2026, 11, 9, 12), at(2026, 11, 16), days=7).week is False
    assert calendar(at(2026, 10, 19), at(2026, 10, 26)).length == "7 days", "of 169 hours"


def test_an_hour_that_is_there_twice_is_told_apart() -> None:
    week = calendar(at(2026, 10, 19), at(2026, 10, 26))
    assert week.title == "Mon 19 Oct to Sun 25 Oct 2026"
    twice = at(2026, 10, 25, 2, 30)
    assert week.clock(twice) == "02:30 CEST"
    assert week.clock(twice + 3600) == "02:30 CET"


def test_signals_without_data_are_grouped_by_what_the_server_needs() -> None:
    engines = ("a, engine 0",)
    lora = "is not on the page (needs --enable-lora)"
    groups = unknown_groups(
        [
            UnknownSignal("lora_max", f"lora_requests_info {lora}", engines),
            UnknownSignal("lora_running", f"running_adapters {lora}", engines),
            UnknownSignal("gpu_*", "no GPU source", engines),
            UnknownSignal("lora_waiting", f"lora_requests_info {lora}", ("b, engine 0",)),
        ]
    )
    assert [(why, signals) for why, _, signals in groups] == [
        ("needs --enable-lora", ["lora_max", "lora_running"]),
        ("no GPU source", ["gpu_*"]),
        ("needs --enable-lora", ["lora_waiting"]),
    ]


def test_both_tables_have_one_target_for_the_eviction_rate() -> None:
    rules = {rule.id: rule for rule in RULES}
    bands = {
        row.band
        for row in (*monitoring(1, rules), *kv_metrics(rules))
        if row.subject in ("KV cache eviction rate", "Eviction rate")
    }
    assert bands == {"below 5% of running requests/s"}
