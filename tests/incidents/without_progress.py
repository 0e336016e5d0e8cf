"""Engines that work and answer nobody."""

from __future__ import annotations

from msgspec.structs import replace

from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, STEP_S, Load, Phases, then

FAILS_S, SURE_S, LASTS_S = 120.0, 165.0, 300.0
SCALE_OUT = frozenset({"replicas", "--max-num-seqs"})
NO_OUTPUT = replace(SERVING, first_tokens_per_s=0.0, finished_per_s=0.0, generated_per_s=0.0)

SWEEP_STEPS = 7
"""Pages in one round of a prefill that is begun again and again."""


def prefilled_again(at_s: float) -> Load:
    """960 prompt tokens a second into a cache of 60 blocks that fills to 98.9% and is emptied."""
    if at_s < FAILS_S:
        return SERVING
    share = (round(at_s / STEP_S) % SWEEP_STEPS + 1) / SWEEP_STEPS
    return replace(
        NO_OUTPUT, running=1, waiting=3, kv_ratio=0.989 * share, prompt_per_s=960.0, blocks=60
    )


def long_prefill(at_s: float) -> Load:
    """A prompt that takes 100 s to prefill, and then its answer."""
    if at_s < FAILS_S:
        return replace(SERVING, running=0, kv_ratio=0.0, first_tokens_per_s=0, finished_per_s=0)
    if at_s < FAILS_S + 100:
        return replace(NO_OUTPUT, running=1, kv_ratio=(at_s - FAILS_S) / 100, prompt_per_s=0.0)
    return replace(SERVING, running=1, kv_ratio=0.99, finished_per_s=0.0)


def prefilled_whole(ends_s: float) -> Phases:
    """Without chunked prefill: no gauge and no counter moves until the prompt is done at `ends_s`.
    Prompts before it took up to 45 s."""

    def load_at(at_s: float) -> Load:
        if FAILS_S <= at_s < ends_s:
            return replace(NO_OUTPUT, prompt_per_s=0.0, prefill_s=0.5)
        return replace(SERVING, prefill_s=45.0 if at_s == STEP_S else 0.5)

    return load_at


def fetches_without_end(at_s: float) -> Load:
    """Every request that comes takes its blocks and waits for its KV from elsewhere."""
    if at_s < FAILS_S:
        return SERVING
    deferred = 0.1 * (at_s - FAILS_S)
    return replace(
        NO_OUTPUT, running=0, deferred=deferred, kv_ratio=0.04 * deferred, prompt_per_s=0
    )


INCIDENTS = (
    Incident(
        name="a prefill is begun again and again",
        source="KV to 98.9%, 960 tokens/s",
        load_at=prefilled_again,
        lasts_s=LASTS_S,
        judged_from_s=SURE_S + 35,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="a request larger than the KV cache",
        source="vllm 52520",
        load_at=then(SERVING, FAILS_S, **{**dict.fromkeys((
            "running", "kv_ratio", "first_tokens_per_s", "finished_per_s", "generated_per_s",
            "prompt_per_s"), 0.0), "waiting": 5.0}),
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="requests wait for remote KV for ever",
        source="vllm 45388, 36958",
        load_at=fetches_without_end,
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="scheduler deadlock, full cache, a connector",
        source="vllm 45388",
        load_at=then(NO_OUTPUT, 0.0, running=6.0, waiting=20.0, deferred=4.0, kv_ratio=1.0,
                     prompt_per_s=0.0),
        lasts_s=LASTS_S,
        judged_from_s=45,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="deferred requests fill the seats",
        source="vllm 45388",
        load_at=then(NO_OUTPUT, 0.0, deferred=16.0, waiting=20.0, running=0.0, prompt_per_s=0.0),
        lasts_s=LASTS_S,
        judged_from_s=45,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="wedged: gauges at 0, calls end unanswered",
        source="vllm 46811, 37729",
        load_at=then(replace(SERVING, accepted_per_s=2.0), FAILS_S, running=0.0, kv_ratio=0.0,
                     first_tokens_per_s=0.0, finished_per_s=0.0, generated_per_s=0.0,
                     prompt_per_s=0.0),
        lasts_s=LASTS_S,
        judged_from_s=FAILS_S + 100,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="wedged from the first look on",
        source="vllm 46811, 37729",
        load_at=lambda _: Load(accepted_per_s=1.0),
        lasts_s=60.0,
        judged_from_s=40.0,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="a call a minute that ends unanswered",
        source="healthy",
        load_at=lambda _: Load(accepted_per_s=0.02),
        lasts_s=LASTS_S,
        judged_from_s=0,
        first_cause=NOTHING,
    ),
    Incident(
        name="prefilled whole in 45 s, then its answer",
        source="healthy",
        load_at=prefilled_whole(FAILS_S + 45.0),
        lasts_s=LASTS_S,
        judged_from_s=FAILS_S,
        first_cause=NOTHING,
    ),
    Incident(
        name="a hang where prompts took 45 s before",
        source="vllm 46811",
        load_at=prefilled_whole(LASTS_S + 1.0),
        lasts_s=LASTS_S,
        judged_from_s=FAILS_S + 90.0,
        first_cause="engine_stalled",
        no_change=SCALE_OUT,
    ),
    Incident(
        name="a prompt of 100 s, then its answer",
        source="healthy",
        load_at=long_prefill,
        lasts_s=LASTS_S,
        judged_from_s=FAILS_S,
        first_cause=NOTHING,
    ),
)  # fmt: skip
