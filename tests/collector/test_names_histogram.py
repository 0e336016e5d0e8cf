"""Histograms that are damaged, bare or out of order."""

from __future__ import annotations

import math
import re

import pytest

from tests.collector.name_pages import labelled, only_engine, recorded, resolved

TTFT = "time_to_first_token_seconds"
BUCKET = rf"vllm:{TTFT}_bucket\{{.*"


def page_with(pattern: str, replacement: str) -> str:
    """The recorded page with something about its TTFT histogram changed."""
    body = recorded("0.28.0-loaded")
    changed = re.sub(rf"(?m)^{pattern}", replacement, body)
    assert changed != body
    return changed


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (rf'{BUCKET}le="\+Inf".*\n', ""),
        (rf'({BUCKET}le=)"0\.5"', r'\1"half"'),
        (rf'({BUCKET}le=)"0\.5"', r'\1"NaN"'),
        (rf'({BUCKET}),?le="0\.5",?', r"\1"),
        # the two stand side by side after a restart with another client library
        (rf'({BUCKET}le=)"0\.5"(.*\n)', r'\1"0.5"\2\1"0.50"\2'),
        (rf"vllm:{TTFT}_(?:bucket|count)\{{.*\n", ""),
    ],
)
def test_a_damaged_histogram_is_dropped(pattern: str, replacement: str) -> None:
    _, binding = resolved(page_with(pattern, replacement))
    engine = only_engine(binding)
    assert TTFT not in engine.histograms
    assert "e2e_request_latency_seconds" in engine.histograms


def test_damage_to_one_engine_leaves_the_others_alone() -> None:
    torn = labelled(page_with(rf'{BUCKET}le="\+Inf".*\n', ""), engine="1")
    _, binding = resolved(recorded("0.28.0-loaded") + torn)
    first, second = binding.engines
    assert TTFT in first.histograms
    assert TTFT not in second.histograms


def test_buckets_may_stand_in_any_order() -> None:
    body = recorded("0.28.0-loaded")
    lines = re.findall(rf"(?m)^{BUCKET}\n", body)
    turned = body.replace("".join(lines), "".join(reversed(lines)))
    assert turned != body
    page, binding = resolved(turned)
    (ttft,) = only_engine(binding).histograms[TTFT]
    assert list(ttft.bounds) == sorted(ttft.bounds)
    counts = [page.values[at] for at in ttft.buckets]
    assert counts == sorted(counts)


def test_without_buckets_the_mean_is_left() -> None:
    page, binding = resolved(page_with(rf"{BUCKET}\n", ""))
    engine = only_engine(binding)
    (ttft,) = engine.histograms[TTFT]
    assert (ttft.bounds, ttft.buckets) == ((math.inf,), (ttft.count,))
    assert ttft.sum is not None
    assert ttft.count is not None
    assert page.values[ttft.sum] / page.values[ttft.count] == pytest.approx(25.04, abs=0.01)


def test_a_missing_count_is_that_of_the_last_bucket() -> None:
    _, binding = resolved(page_with(rf"vllm:{TTFT}_(?:sum|count)\{{.*\n", ""))
    (ttft,) = only_engine(binding).histograms[TTFT]
    assert (ttft.sum, ttft.count) == (None, ttft.buckets[-1])


def test_histograms_with_own_labels_are_one_for_each() -> None:
    body = recorded("0.28.0-loaded")
    for status in ("ok", "failed"):
        labels = f'engine="0",model_name="tiny",operation="get",status="{status}"'
        name = "vllm:mooncake_store_operation_time_seconds"
        body += f'{name}_bucket{{{labels},le="1"}} 1\n{name}_bucket{{{labels},le="+Inf"}} 2\n'
        body += f"{name}_count{{{labels}}} 2\n{name}_sum{{{labels}}} 3\n"
    _, binding = resolved(body)
    histograms = only_engine(binding).histograms["mooncake_store_operation_time_seconds"]
    assert [dict(histogram.labels)["status"] for histogram in histograms] == ["ok", "failed"]
    assert all(histogram.bounds == (1.0, math.inf) for histogram in histograms)
