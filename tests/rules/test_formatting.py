"""Numbers, durations and lines for reading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kneewatch import rules
from kneewatch.diagnose.engine.diagnosis import judged_against
from kneewatch.reports.lines import cut, lasting, moment, printable, wrapped
from kneewatch.rules.facts import NO_TARGETS, Targets
from kneewatch.rules.formatting import (
    alike,
    duration,
    number,
    percent,
    quantity,
    rate,
    singular,
    span,
)
from tests.reports.diagnoses import NOW_S


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (17.0, "17"),
        (0.00123456, "0.00123"),
        (3.14159, "3.14"),
        (999.4, "999"),
        (131072.0, "131,072"),
        (-5.5, "-5.5"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (0.0, "0%"),
        (0.0004, "0%"),
        (0.002, "0.2%"),
        (0.05, "5%"),
        (0.0943, "9.4%"),
        (0.0999, "10%"),
        (0.849, "85%"),
        (1.0, "100%"),
        (-0.2, "-20%"),
    ],
)
def test_percent(ratio: float, shown: str) -> None:
    assert percent(ratio) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ms"),
        (0.0012, "1.2 ms"),
        (0.0012345, "1.2 ms"),
        (0.009961, "10 ms"),
        (0.05764, "58 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (2.4631, "2.5 s"),
        (39.671, "40 s"),
        (315.0, "5 min"),
        (600.0, "10 min"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3.0, "0 s"),
        (0.4, "0 s"),
        (119.4, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2.0 h"),
        (172_800.0, "2.0 days"),
        (864_000.0, "10.0 days"),
    ],
)
def test_span(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("ttft_p99_s", 2.4631, "2.5 s"),
        ("ttft_p99_s", 0.0786, "79 ms"),
        ("ttft_p99_s", None, "-"),
        ("kv_usage_ratio", 0.5, "50%"),
        ("kv_demand_ratio", 1.73, "173%"),
        ("ttft_p99_drift_ratio", 3.25, "3.25"),
        ("preemption_ratio_per_s", 0.241, "24%/s"),
        ("prompt_tokens_per_s", 2350.2, "2,350/s"),
        ("arrival_per_s", 0.00012, "0.00012/s"),
        ("arrival_per_s", 9.7e-13, "0/s"),
        ("waiting_slope_per_s", -9.7e-13, "0/s"),
        ("memory_bytes_per_s", 3.35e12, "3,350 GB/s"),
        ("host_memory_available_bytes", 107_420_000.0, "0.1 GiB"),
        ("prefill_hit_share", 0.25, "25%"),
        ("running", 17.0, "17"),
    ],
)
def test_quantity(key: str, value: float | None, shown: str) -> None:
    assert quantity(key, value) == shown


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("itl_mean_drift_ratio", (1.3, 1.0), ["1.3", "1"]),
        ("kv_usage_ratio", (0.95, 1.0), ["95%", "100%"]),
        ("host_memory_available_bytes", (107_420_000.0, 10_476_000_000.0), ["0.1 GiB", "9.76 GiB"]),
    ],
)
def test_two_values_of_a_signal_have_one_format(
    key: str, values: tuple[float, float], shown: list[str]
) -> None:
    assert alike(key, *values) == shown


def test_a_moment_has_its_day_where_it_is_another() -> None:
    assert moment(NOW_S, NOW_S) == "00:06:40 UTC"
    assert moment(NOW_S - 3600, NOW_S) == "2026-11-20 23:06:40 UTC"


def test_lasting() -> None:
    assert lasting(NOW_S - 0.4, NOW_S) == "as of 00:06:39 UTC"
    assert lasting(NOW_S - 90, NOW_S) == "for 90 s, since 00:05:10 UTC"


def test_wrapped() -> None:
    line = "do first: lower --max-num-seqs and read http://a/very-long/address/that/stays/whole"
    assert wrapped(line, width=30, indent=3, more=2) == [
        "   do first: lower",
        "     --max-num-seqs and read",
        "     http://a/very-long/address/that/stays/whole",
    ]
    assert wrapped("", width=30) == []


def test_cut() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"


def test_what_could_steer_a_terminal_is_replaced() -> None:
    assert printable("ok é 模型") == "ok é 模型"
    assert printable("a\x1b[2Jb\nc\u202ed\x07") == "a?[2Jb?c?d?"


@pytest.mark.parametrize(
    ("stated_s", "shown"),
    [
        (0.0355, "35.5 ms"),
        (0.5, "500 ms"),
        (1.25, "1.25 s"),
        (2.0, "2.0 s"),
        (2.35, "2.35 s"),
        (10.0, "10 s"),
        (12.5, "12.5 s"),
        (90.0, "90 s"),
    ],
)
def test_targets_read_as_they_were_stated(stated_s: float, shown: str) -> None:
    targets = Targets(ttft_p99_s=stated_s, itl_p99_s=stated_s)
    said = judged_against(targets, NO_TARGETS, has_baseline=False)
    assert said == f"targets: TTFT P99 {shown}, ITL P99 {shown}"


@pytest.mark.parametrize("folder", ["diagnose", "reports", "agent"])
def test_shares_have_no_other_format(folder: str) -> None:
    others = [
        f"{file}: {match.group()}"
        for file in sorted((Path(rules.__path__[0]).parent / folder).rglob("*.py"))
        for match in re.finditer(r"\{[^{}]*:\.[0-9]+%\}", file.read_text(encoding="utf-8"))
    ]
    assert others == []


@pytest.mark.parametrize(
    ("per_s", "shown"),
    [
        (4.63, "4.6 requests/s"),
        (0.1, "0.1 requests/s"),
        (0.04, "2.4 requests/min"),
        (0.0005, "1.8 requests/h"),
    ],
)
def test_a_rate_does_not_round_to_zero(per_s: float, shown: str) -> None:
    assert rate(per_s, "requests") == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("1 requests wait for KV", "1 request waits for KV"),
        ("1 requests are waiting for a slot", "1 request is waiting for a slot"),
        ("11 requests wait, 0.1 requests/s arrive", "11 requests wait, 0.1 requests/s arrive"),
        ("1 queued requests, 1 adapters of 2", "1 queued request, 1 adapter of 2"),
        ("a batch of 1 steps, TP 1 engines", "a batch of 1 step, TP 1 engine"),
        ("1 of the requests, 2.1 tokens", "1 of the requests, 2.1 tokens"),
    ],
)
def test_one_is_singular(said: str, shown: str) -> None:
    assert singular(said) == shown
