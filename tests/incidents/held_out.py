"""Incidents of issue threads whose verdict was written down before kneewatch had seen the page."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import Incident
from tests.incidents.pages import SERVING, STEP_S, Load, Phases

BEGINS_S, SURE_S, LASTS_S = 240.0, 120.0, 600.0
CHAT = replace(
    SERVING,
    prompt_tokens=200.0,
    answer_tokens=50.0,
    queued_s=0.01,
    prefill_s=0.08,
    steps_per_s=50.0,
    step_tokens=6.0,
    hit_ratio=0.3,
)
"""A healthy server with the metrics of requests' phases and of steps."""


def after_chat(load: Load) -> Phases:
    """A healthy server until the incident begins."""
    return lambda at_s: load if at_s >= BEGINS_S else CHAT


def too_many_images(at_s: float) -> Load:
    """A request larger than the encoder cache is first in the queue: running ones end, then none
    runs."""
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return CHAT
    running = max(0.0, 4.0 - since_s / 5.0)
    return replace(
        CHAT, running=running, waiting=1.0 + 0.2 * since_s, kv_ratio=0.075 * running,
        first_tokens_per_s=0.0, finished_per_s=0.0, generated_per_s=25.0 * running,
        prompt_per_s=0.0,
    )  # fmt: skip


def one_fills_the_cache(at_s: float) -> Load:
    """One request generates 5.4 tokens a second for over an hour, and 14 wait."""
    return Load(
        running=1.0, waiting=14.0, kv_ratio=0.765 + 0.0002 * at_s / 10.0, generated_per_s=5.4,
        itl_s=0.185, blocks=8192, hit_ratio=0.92,
    )  # fmt: skip


def starved_streams(at_s: float) -> Load:
    """Three streams get a token per step of 8,192 prompt tokens, each of which takes 4 s."""
    if at_s < BEGINS_S:
        return replace(CHAT, running=3.0, blocks=60_000)
    return Load(
        running=4.0, kv_ratio=min(0.6, 0.3 + (at_s - BEGINS_S) / 1000.0), generated_per_s=0.75,
        itl_s=4.0, steps_per_s=0.25, step_tokens=8195.0, blocks=60_000, prefill_s=0.08,
        queued_s=0.01, hit_ratio=0.3,
    )  # fmt: skip


def waits_for_the_prefill_side(at_s: float) -> Load:
    """A decode server with vLLM 0.26: requests whose KV does not come pile up beside those that
    run."""
    healthy = replace(CHAT, running=20.0, generated_per_s=900.0, tier_lookups_per_s=400.0)
    if at_s < BEGINS_S:
        return healthy
    return replace(healthy, deferred=0.3 * (at_s - BEGINS_S), running=12.0, generated_per_s=540.0)


def two_long_contexts(at_s: float) -> Load:
    """One request of 230,000 tokens decodes at 15 tokens a second, two of them at 0.3."""
    alone = Load(
        running=1.0, kv_ratio=0.4, generated_per_s=15.0, itl_s=0.067, first_tokens_per_s=0.02,
        finished_per_s=0.02, request_s=50.0, blocks=40_000, answer_tokens=700.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return alone
    return replace(
        alone, running=2.0, kv_ratio=0.8, generated_per_s=0.3, itl_s=6.7, first_tokens_per_s=0.0,
        finished_per_s=0.0,
    )  # fmt: skip


def burst_of_long_prompts(at_s: float) -> Load:
    """100 prompts of 40,000 tokens at once: 0.6 prefills a second."""
    started = 10.0 + 0.6 * at_s
    return Load(
        running=min(52.0, started), waiting=max(48.0, 100.0 - started),
        kv_ratio=min(0.93, 0.193 + 0.0116 * at_s), prompt_per_s=24_000.0,
        generated_per_s=18.0 + 1.6 * at_s, first_tokens_per_s=0.6, finished_per_s=0.0,
        ttft_s=20.0 + at_s, itl_s=0.4, blocks=200_000, steps_per_s=2.9, step_tokens=8200.0,
        hit_ratio=0.0,
    )  # fmt: skip


def never_ends(at_s: float) -> Load:
    """Structured answers of a model that pads them with blanks up to `max_tokens`."""
    if at_s < BEGINS_S:
        return replace(CHAT, answer_tokens=400.0, generated_per_s=800.0, running=16.0)
    running = min(64.0, 16.0 + 0.4 * (at_s - BEGINS_S))
    return replace(
        CHAT, answer_tokens=1800.0, running=running, kv_ratio=0.3 + 0.006 * (running - 16.0),
        generated_per_s=50.0 * running, finished_per_s=1.8, request_s=40.0, cut_share=0.95,
    )  # fmt: skip


def one_slot(at_s: float) -> Load:
    """Requests of three adapters take turns in the one slot that --enable-lora has by default."""
    if at_s < BEGINS_S:
        return replace(CHAT, adapters=("a", ""))
    turn = round(at_s / STEP_S / 4) % 3
    names = ("a", "b", "c")
    waiting = ",".join(name for name in names if name != names[turn])
    return replace(
        CHAT, running=1.0, deferred=3.0, kv_ratio=0.031, generated_per_s=45.7,
        first_tokens_per_s=0.1, finished_per_s=0.1, prompt_per_s=20.0, ttft_s=20.0, queued_s=20.0,
        adapters=(names[turn], waiting),
    )  # fmt: skip


IMAGES = Load(
    running=2.0, kv_ratio=0.04, first_tokens_per_s=0.45, finished_per_s=0.45,
    generated_per_s=51.0, prompt_per_s=9400.0, prompt_tokens=9000.0, answer_tokens=114.0,
    ttft_s=600.0, request_s=610.0, queued_s=0.02, prefill_s=1.8, outside_s=598.0, itl_s=0.02,
    steps_per_s=30.0, step_tokens=300.0, hit_ratio=0.3, blocks=60_000,
)  # fmt: skip
"""Frames of videos are decoded by the API server: 0.45 of 32 requests a second reach the engine."""

NEVER_HIT = Load(
    running=8.0, kv_ratio=0.5, first_tokens_per_s=0.3, finished_per_s=0.3, generated_per_s=30.0,
    prompt_per_s=9600.0, prompt_tokens=32_000.0, answer_tokens=100.0, ttft_s=18.0,
    request_s=26.0, queued_s=0.1, prefill_s=18.0, itl_s=0.08, hit_ratio=0.0, block_tokens=256,
    blocks=2_000, steps_per_s=5.0, step_tokens=8192.0,
)  # fmt: skip


INCIDENTS = (
    Incident(
        name="a video larger than the encoder cache",
        source="vllm 26223, 31857",
        load_at=too_many_images,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="engine_stalled",
        no_change=frozenset({"replicas", "--max-num-seqs"}),
    ),
    Incident(
        name="one request fills the cache, 14 wait",
        source="intel/llm-scaler 391",
        load_at=one_fills_the_cache,
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="kv_pressure",
    ),
    Incident(
        name="prefills starve three streams for minutes",
        source="vllm 54919",
        load_at=starved_streams,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="prefill_interference",
        least=Severity.WARNING,
        never=frozenset({"engine_stalled"}),
    ),
    Incident(
        name="the prefill side is not ready",
        source="vllm 50719",
        load_at=waits_for_the_prefill_side,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="kv_transfer_slow",
        least=Severity.WARNING,
    ),
    Incident(
        name="two contexts of 230,000 tokens, 0.3 tokens/s",
        source="1CatAI/1Cat-vLLM 490",
        load_at=two_long_contexts,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="slow_steps",
    ),
    Incident(
        name="100 prompts of 40,000 tokens at once",
        source="vllm 37307",
        load_at=burst_of_long_prompts,
        lasts_s=120.0,
        judged_from_s=60.0,
        first_cause="queue_saturation",
    ),
    Incident(
        name="structured answers that never end",
        source="vllm 40080",
        load_at=never_ends,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="runaway_generation",
        least=Severity.WARNING,
    ),
    Incident(
        name="three adapters, one slot",
        source="vllm 11517",
        load_at=one_slot,
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="adapter_thrash",
        least=Severity.WARNING,
    ),
    Incident(
        name="videos are decoded before the engine",
        source="vllm 44404",
        load_at=after_chat(IMAGES),
        lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S,
        first_cause="host_contention",
        least=Severity.WARNING,
    ),
    Incident(
        name="prompts of 32,000 tokens that never hit",
        source="vllm 42948, 45633",
        load_at=lambda _: NEVER_HIT,
        lasts_s=LASTS_S,
        judged_from_s=3 * SURE_S,
        first_cause="prefix_reuse_lost",
        least=Severity.INFO,
    ),
)
