"""Archetypes, tails and sessions as the guide's first chapter has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.plan.workload_profile import ARCHETYPES, TARGETS
from kneewatch.diagnose.sizing.plan.workload_steps import session_prefill_tokens


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
    entry = ARCHETYPES[name]
    assert (entry["slo"], entry["hardware"]) == (slo, hardware)


def test_archetypes_are_four_and_distinct() -> None:
    assert len({entry["bottleneck"] for entry in ARCHETYPES.values()}) == len(ARCHETYPES) == 4


def test_online_and_batch_optimise_for_different_things() -> None:
    assert TARGETS["online"]["optimize"] == "TTFT"
    assert TARGETS["batch"]["optimize"] == "tokens per GPU-hour"


def test_a_session_is_an_order_of_magnitude_more_than_a_call() -> None:
    def prefill(calls: int) -> tuple[int, int]:
        return session_prefill_tokens(
            Sheet(), calls=calls, first_prompt_tokens=4000, added_tokens=9000, output_tokens=500
        )

    assert prefill(1) == (4000, 4000)
    computed, cached = prefill(10)
    assert computed == 10 * 4000 + 9500 * 45
    assert cached == 4000 + 9 * 9000
    assert computed / 4000 > 10  # guide 1.2


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
    computed, cached = session_prefill_tokens(
        Sheet(), calls=calls, first_prompt_tokens=first, added_tokens=added, output_tokens=output
    )
    assert computed == sum(prompts)
    assert cached <= computed
