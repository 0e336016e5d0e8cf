"""MFU and MBU as a live server shows them, in place of the roofline's defaults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kneewatch.diagnose.recommend.prediction import costs_of
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.speed.performance import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, with_shares
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE, advised
from tests.diagnose.situations import Situation

assert LLAMA.model is not None
SERVER = Setup(
    model=LLAMA.model, gpu=LLAMA.gpu, version=(0, 32, 0), gpu_memory_utilization=0.9,
    block_tokens=16,
)  # fmt: skip
KNOWN = costs_of(SERVER)
DECODES = FULL.but(
    running_min=80.0, prompt_tokens_mean=200.0, output_tokens_mean=1400.0, waiting=0.0,
    waiting_avg=0.0, waiting_by_capacity=0.0,
)  # fmt: skip
PROMPTS = FULL.but(
    running_min=10.0, running=16.0, running_avg=16.0, running_max=16.0, waiting=0.0,
    waiting_avg=0.0, waiting_by_capacity=0.0, prompt_tokens_mean=6000.0, output_tokens_mean=60.0,
)  # fmt: skip


def at(situation: Situation, **shares: float) -> Performance:
    """What the server yields at those shares of its peaks, by the roofline itself."""
    values = situation.values
    load = Load(
        input_tokens=values["prompt_tokens_mean"] or 0.0,
        output_tokens=values["output_tokens_mean"] or 0.0,
        concurrency=values["running_avg"] or 0.0,
        max_num_batched_tokens=SERVER.batched_tokens,
    )
    return performance(KNOWN, load, with_shares(DEFAULT, **shares))


def seen(situation: Situation, **shares: float) -> Situation:
    """The page of that server: its ITL, and the work that vLLM counts."""
    found, values = at(situation, **shares), situation.values
    reading = found.decode_step.memory_s * KNOWN.bandwidth_bytes_per_s
    inputs, outputs = values["prompt_tokens_mean"] or 0.0, values["output_tokens_mean"] or 0.0
    flop = (inputs + outputs) * KNOWN.body_flop_per_token + outputs * KNOWN.head_flop_per_token
    flop += (inputs**2 / 2 + outputs * (inputs + outputs / 2)) * KNOWN.flop_per_pair
    return situation.but(
        itl_mean_s=found.itl_s,
        memory_bytes_per_s=reading * shares.get("mbu_ratio", DEFAULT.mbu_ratio) / found.itl_s,
        flop_per_s=found.requests_per_s * flop,
    )


def told(situation: Situation) -> Recommendation:
    """A recommendation with predicted latencies."""
    made = advised("decode_bound", situation=situation, stated=LLAMA)["replicas"]
    assert "itl_s" in made.predicted
    return made


def test_the_share_of_the_bandwidth_is_found_where_reading_binds() -> None:
    made = told(seen(DECODES, mbu_ratio=0.6))

    assert "Speed predicted with the measured MBU of 60%." in made.summary
    assert not any("MBU" in words for words in made.unknown)
    # Half of the requests on each of twice the replicas.
    replicas = made.changes[0].after
    assert isinstance(replicas, int)
    half = replace(DECODES, values={**DECODES.values, "running_avg": 100.0 * 2 / replicas})
    assert made.predicted["itl_s"] == pytest.approx(at(half, mbu_ratio=0.6).itl_s, rel=0.02)


def test_with_the_default_the_same_server_would_be_told_otherwise() -> None:
    page = seen(DECODES, mbu_ratio=0.4)
    blind = page.but(memory_bytes_per_s=None, flop_per_s=None)

    assert told(page).predicted["itl_s"] != pytest.approx(told(blind).predicted["itl_s"], rel=0.01)
    assert any("--enable-mfu-metrics" in words for words in told(blind).unknown)


def test_the_share_of_the_compute_peak_is_found_where_prompts_bind() -> None:
    assert "the measured MFU of 25%" in told(seen(PROMPTS, mfu_ratio=0.25)).summary


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param(
            {"memory_bytes_per_s": 0.0, "flop_per_s": 0.0},
            "--enable-mfu-metrics",
            id="switched off",
        ),
        pytest.param({"running_min": 0.0}, "the present load does not reveal them", id="ran empty"),
        pytest.param(
            {"prompt_tokens_mean": 1000.0, "output_tokens_mean": 400.0},
            "the present load does not reveal them",
            id="prompts and decodes take their time alike",
        ),
        pytest.param(
            {"memory_bytes_per_s": 1e15}, "the present load does not reveal them", id="nonsense"
        ),
        pytest.param(
            {"memory_bytes_per_s": 1.0}, "the present load does not reveal them", id="next to none"
        ),
    ],
)
def test_what_shows_no_share_leaves_the_default_and_says_so(
    changed: dict[str, float], why: str
) -> None:
    made = told(seen(DECODES, mbu_ratio=0.6).but(**changed))

    assert "measured" not in made.summary
    assert [words for words in made.unknown if why in words]


def test_without_a_prediction_nothing_is_said_of_shares() -> None:
    made = advised("decode_bound", situation=seen(DECODES, mbu_ratio=0.6), page=PAGE)["replicas"]

    assert "measured" not in made.summary
    assert not any("MBU" in words for words in made.unknown)
