"""The ranges of a fleet's samples: every scrape is read once, whenever cycles come."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from kneewatch.agent.fleet.engines import HISTORY_S, unread_s
from kneewatch.collector.prometheus.responses import RawSeries
from kneewatch.collector.prometheus.scraped_pages import ScrapedPages, target_of

LABELS = {"__name__": "vllm:num_requests_running", "instance": "a:8000", "job": "vllm"}
TARGET = target_of(LABELS)


@example(5.0, 15.0, [0.0625, -0.12, 0.0625, *[0.0] * 57], 0.005)
@given(
    st.sampled_from((5.0, 15.0, 30.0, 60.0)),
    st.sampled_from((15.0, 30.0, 60.0)),
    st.lists(st.floats(-0.12, 0.12), min_size=60, max_size=60),
    st.floats(0.0, 1.0),
)
def test_every_scrape_is_read_once(
    own_s: float, cycle_s: float, jitters: list[float], phase_ratio: float
) -> None:
    scrapes_s = [round((at + jitter) * own_s, 3) for at, jitter in enumerate(jitters)]
    pages, at_s, read_s = ScrapedPages(), (2 + phase_ratio) * own_s, list[float]()
    twice, before_s = 0, 0.0
    while at_s < scrapes_s[-1]:
        passed_s = at_s - pages.read_until_s(TARGET)
        span_s = unread_s(passed_s, pages.interval_s(TARGET), max(own_s, cycle_s), before_s)
        before_s = span_s or before_s
        seen = [t_s for t_s in scrapes_s if at_s - span_s < t_s <= at_s]
        twice += len(set(seen) & set(read_s)) if span_s < HISTORY_S else 0
        if seen:
            samples = Raw(msgspec.json.encode([(t_s, "1") for t_s in seen]))
            pages.add([RawSeries(Raw(msgspec.json.encode(LABELS)), samples)])
        read_s += [t_s for t_s, _ in pages.pages(TARGET)]
        at_s += cycle_s
    assert read_s == [t_s for t_s in scrapes_s if t_s <= max(read_s)]
    assert at_s - max(read_s) <= 2 * max(own_s, cycle_s) * 1.5
    assert twice == 0


@given(st.floats(1.0, 1.99), st.lists(st.floats(-0.05, 0.05), min_size=1, max_size=40))
def test_ranges_stay_while_cycles_are_a_little_early_or_late(
    passed_ratio: float, jitters: list[float]
) -> None:
    spans_s, before_s = list[float](), 0.0
    for jitter in jitters:
        before_s = unread_s((passed_ratio + jitter) * 15.0, 15.0, 15.0, before_s) or before_s
        spans_s.append(before_s)
    kept = [span_s for span_s in spans_s if span_s]
    assert sum(a != b for a, b in itertools.pairwise(kept)) <= 1
