"""Archetypes, tails and sessions as the guide's first chapter has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.replicas.archetypes import (
    ARCHETYPES,
    TARGETS,
    archetype,
    chunks,
    mixed_tokens,
    prefill_time_ratio,
    reading_speed_ratio,
    session_tokens,
    tail_requests_held,
)


@pytest.mark.parametrize(
    ("name", "slo", "hardware"),
    [
        pytest.param("chat", "TTFT under load", "compute", id="guide 1.2: chat"),
        pytest.param("rag", "TTFT", "compute", id="guide 1.2: RAG"),
        pytest.param("code", "ITL and decode throughput", "bandwidth", id="guide 1.2: code"),
        pytest.param("agentic", "session time", "memory", id="guide 1.2: agentic"),
    ],
)
def test_archetypes(name: str, slo: str, hardware: str) -> None:
    found = archetype(name)
    assert (found.slo, found.hardware) == (slo, hardware)


def test_archetypes_are_four_and_distinct() -> None:
    assert len({known.id for known in ARCHETYPES}) == len(ARCHETYPES) == 4
    assert len({known.bottleneck for known in ARCHETYPES}) == 4


def test_an_unknown_archetype_lists_the_choices() -> None:
    with pytest.raises(SizingError, match="choose one of chat, rag, code, agentic"):
        archetype("gaming")


def test_online_and_batch_optimise_for_different_things() -> None:
    assert TARGETS["online"].optimize == "TTFT"
    assert TARGETS["batch"].optimize == "tokens per GPU-hour"


def test_tokens_come_faster_than_they_are_read() -> None:
    assert reading_speed_ratio(itl_s=0.025) == pytest.approx(3.6)  # guide 1.4: 15-25 ms
    assert reading_speed_ratio(itl_s=0.015) == pytest.approx(6.0)
    assert reading_speed_ratio(itl_s=0.100) < 1


@pytest.mark.parametrize(
    ("planned_requests", "tail_tokens", "expected"),
    [
        pytest.param(50, 32_768, 0, id="guide 1.1: 50 x 512 holds not one of 32K"),
        pytest.param(50, 16_384, 1, id="guide 1: 50 x 512 holds one of 16K"),
        pytest.param(1280, 32_768, 20, id="guide 1.1: 20 of 32K take the room of 1,280"),
    ],
)
def test_the_tail_breaks_what_was_sized_for_the_median(
    planned_requests: int, tail_tokens: int, expected: int
) -> None:
    held = tail_requests_held(
        planned_requests=planned_requests, planned_tokens=512, tail_tokens=tail_tokens
    )
    assert held == expected


def test_one_request_in_a_hundred_carries_two_fifths_of_the_tokens() -> None:
    mean = mixed_tokens(typical_tokens=512, tail_tokens=32_768, tail_ratio=0.01)
    assert mean == pytest.approx(834.6, abs=0.1)
    assert 0.01 * 32_768 / mean == pytest.approx(0.393, abs=1e-3)


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "expected"),
    [
        pytest.param(0.05, 5.0, 0.0099, id="text 003: 50 ms of prefill, 500 x 10 ms"),
        pytest.param(0.8, 0.2, 0.8, id="guide 3.3: 80 % in prefill wants compute"),
    ],
)
def test_prefill_time_ratio(prefill_s: float, decode_s: float, expected: float) -> None:
    ratio = prefill_time_ratio(prefill_s=prefill_s, decode_s=decode_s)
    assert ratio == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "chunk", "expected"),
    [
        pytest.param(16_384, 256, 64, id="guide 6.4: 16K in chunks of 256"),
        pytest.param(16_384, 512, 32, id="guide 6.4: of 512"),
        pytest.param(16_385, 512, 33, id="one token more"),
    ],
)
def test_chunks(prompt: int, chunk: int, expected: int) -> None:
    assert chunks(prompt_tokens=prompt, chunk_tokens=chunk) == expected


def test_a_session_is_an_order_of_magnitude_more_than_a_call() -> None:
    one = session_tokens(calls=1, first_prompt_tokens=4000, added_tokens=9000, output_tokens=500)
    ten = session_tokens(calls=10, first_prompt_tokens=4000, added_tokens=9000, output_tokens=500)
    assert one.prefill_tokens == one.prefill_tokens_cached == 4000
    assert ten.peak_context_tokens == 4000 + 9 * 9500 + 500  # about text 001's 80K
    assert ten.prefill_tokens == 10 * 4000 + 9500 * 45
    assert ten.prefill_tokens_cached == 4000 + 9 * 9000
    assert ten.output_tokens == 5000
    assert ten.prefill_tokens / one.prefill_tokens > 10  # guide 1.2


@given(
    calls=st.integers(1, 60),
    first=st.integers(1, 10_000),
    added=st.integers(0, 10_000),
    output=st.integers(0, 4000),
)
def test_session_totals_are_the_sum_of_its_calls(
    calls: int, first: int, added: int, output: int
) -> None:
    prompts = [first + call * (added + output) for call in range(calls)]
    session = session_tokens(
        calls=calls, first_prompt_tokens=first, added_tokens=added, output_tokens=output
    )
    assert session.prefill_tokens == sum(prompts)
    assert session.peak_context_tokens == prompts[-1] + output
    assert session.prefill_tokens_cached <= session.prefill_tokens
