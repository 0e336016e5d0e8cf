"""Archetypes, tails and sessions as the guide's first chapter has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.plan.workload_profile import (
    ARCHETYPES,
    TARGETS,
    example_profile,
    read_profile,
)
from kneewatch.diagnose.sizing.plan.workload_steps import workload_step
from tests.examples import examples


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


def session_prefill_tokens(*, calls: int, first: int, added: int, output: int) -> list[int]:
    """Prompt tokens of a session's calls, without and with prefix caching, as step 1 has them."""
    stated = {
        "lengths": {
            f"{side}_{level}_tokens": tokens
            for side, tokens in (("input", first), ("output", output))
            for level in ("p50", "p95", "p99", "mean")
        },
        "session": {"calls": calls, "added_tokens": added},
        "prefix": {"shared_tokens": 1},
    }
    steps = workload_step(read_profile(example_profile(), stated=stated)).steps
    whole = [step for step in steps if step.title.startswith("Prompt tokens of a whole session")]
    return [int(step.result.split()[0].replace(",", "")) for step in whole]


def test_a_session_is_an_order_of_magnitude_more_than_a_call() -> None:
    def prefill(calls: int) -> list[int]:
        return session_prefill_tokens(calls=calls, first=4000, added=9000, output=500)

    assert prefill(1) == [4000, 4000]
    computed, cached = prefill(10)
    assert computed == 10 * 4000 + 9500 * 45
    assert cached == 4000 + 9 * 9000
    assert computed / 4000 > 10  # guide 1.2


@examples(50)
@given(
    calls=st.integers(1, 60),
    first=st.integers(1, 10_000),
    added=st.integers(0, 10_000),
    output=st.integers(1, 4000),
)
def test_session_totals_are_the_sum_of_its_calls(
    calls: int, first: int, added: int, output: int
) -> None:
    prompts = [first + call * (added + output) for call in range(calls)]
    computed, cached = session_prefill_tokens(calls=calls, first=first, added=added, output=output)
    assert computed == sum(prompts)
    assert cached <= computed
