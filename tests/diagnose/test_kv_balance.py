"""The balance of KV tokens: what requests in flight cannot explain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.learned.work import FINISHED, KvBalance, Work
from kneewatch.diagnose.values import Values

CAPACITY_TOKENS = 100_000.0
IN_FLIGHT = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 2000)), max_size=12)


def scrape(
    in_flight: list[tuple[int, int]], ended: list[tuple[int, int]], *, held: float = 0.0
) -> Values:
    """A page with requests in flight and ended, each a prompt and an answer in tokens."""
    begun = in_flight + ended
    computed = sum(prompt + answer for prompt, answer in begun)
    fields = {
        "tokens": sum(answer for _, answer in begun),
        "prompt_tokens": sum(prompt for prompt, _ in begun),
        "step_tokens": computed or 1,
        "answers": len(ended),
        "answer_tokens": sum(answer for _, answer in ended),
    }
    counted = [float(fields.get(name, 0.0)) for name in Work.__struct_fields__[2 : 2 + FINISHED]]
    ended_prompts = float(sum(prompt for prompt, _ in ended))
    own = sum(-(-(prompt + answer) // 16) * 16 for prompt, answer in in_flight)
    return Values(
        signals={
            "kv_usage_ratio": held + own / CAPACITY_TOKENS,
            "kv_capacity_tokens": CAPACITY_TOKENS,
            "running": float(len(in_flight)),
            "waiting": 0.0,
        },
        config={"block_size": "16"},
        totals=(*counted, 0.0, 0.0, ended_prompts),
    )


def unaccounted(values: Values, balance: KvBalance | None = None) -> float | None:
    return (balance or KvBalance()).unaccounted(values, values.signals)


@given(in_flight=IN_FLIGHT, ended=IN_FLIGHT)
def test_whole_requests_account_for_all_that_is_in_use(
    in_flight: list[tuple[int, int]], ended: list[tuple[int, int]]
) -> None:
    assert unaccounted(scrape(in_flight, ended)) == 0.0


@given(in_flight=IN_FLIGHT, ended=IN_FLIGHT, held=st.floats(0.1, 0.9))
def test_what_is_held_beside_them_is_found_to_a_block_a_request(
    in_flight: list[tuple[int, int]], ended: list[tuple[int, int]], held: float
) -> None:
    found = unaccounted(scrape(in_flight, ended, held=held))
    assert found is not None
    assert held - 16 * len(in_flight) / CAPACITY_TOKENS - 0.026 <= found <= held + 0.026


def test_aborted_requests_are_forgotten_when_the_engine_is_idle() -> None:
    balance, aborted = KvBalance(), (40_000, 10)
    gone = scrape([aborted], [])
    idle = Values(
        signals={**gone.signals, "running": 0.0, "kv_usage_ratio": 0.0},
        config=gone.config,
        totals=gone.totals,
    )
    assert unaccounted(idle, balance) == 0.0
    later = scrape([aborted], [(100, 10)])
    held = Values(
        signals={**later.signals, "running": 1.0, "kv_usage_ratio": 0.3},
        config=later.config,
        totals=later.totals,
    )
    assert unaccounted(held, balance) == pytest.approx(0.3, abs=0.026)


def test_unknown_without_a_count_of_steps() -> None:
    values = scrape([(100, 10)], [])
    assert values.totals is not None
    silent = Values(signals=values.signals, totals=(*values.totals[:14], 0.0, *values.totals[15:]))
    assert unaccounted(silent) is None
