"""Incidents that were written down before kneewatch had seen their pages: what it said wrongly."""

from __future__ import annotations

from msgspec.structs import replace

from tests.incidents.held_out import BEGINS_S, CHAT
from tests.incidents.pages import Load
from tests.incidents.second_held_out import incident, milder, never, never_scaled_out

BUSY = replace(
    CHAT, running=18.0, kv_ratio=0.1, generated_per_s=720.0, itl_s=0.025, answer_tokens=600.0,
    first_tokens_per_s=1.2, finished_per_s=1.2, request_s=15.3, prompt_per_s=3000.0,
    prompt_tokens=2500.0, prefill_s=0.3, steps_per_s=40.0, step_tokens=70.0, blocks=30_000,
)  # fmt: skip


def one_decodes_on(at_s: float) -> Load:
    """One request decodes on, and no prompt is prefilled any more: the queue grows."""
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return BUSY
    return replace(
        BUSY, running=1.0, waiting=1.2 * since_s, kv_ratio=0.02, generated_per_s=42.0,
        itl_s=0.024, first_tokens_per_s=0.0, finished_per_s=0.0, prompt_per_s=0.0,
        steps_per_s=42.0, step_tokens=1.0,
    )  # fmt: skip


def long_answers_fill_the_seats(at_s: float) -> Load:
    """All 18 seats have answers of ten minutes: none is admitted meanwhile."""
    if at_s < BEGINS_S:
        return BUSY
    return replace(
        BUSY, waiting=0.2 * (at_s - BEGINS_S), first_tokens_per_s=0.0, finished_per_s=0.0,
        prompt_per_s=0.0, step_tokens=18.0, kv_ratio=0.2,
    )  # fmt: skip


DECODES = replace(
    CHAT, running=10.5, kv_ratio=0.14, generated_per_s=800.0, itl_s=0.013, answer_tokens=400.0,
    first_tokens_per_s=2.0, finished_per_s=2.0, request_s=5.3, prompt_per_s=12_000.0,
    prompt_tokens=6000.0, prefill_s=0.03, hit_ratio=0.0, tier_lookups_per_s=12_000.0,
    tier_hit_ratio=1.0, steps_per_s=76.0, step_tokens=11.0, blocks=30_000,
    failed_transfers_per_s=0.0,
)  # fmt: skip
"""A decode server before vLLM 0.16: no metric says which prompt tokens it computes itself."""


def computes_prompts_itself(at_s: float) -> Load:
    """Transfers from one of two prefill servers fail: half of the prompts are computed here."""
    if at_s < BEGINS_S:
        return DECODES
    return replace(
        DECODES, tier_hit_ratio=0.5, failed_transfers_per_s=1.0, prefill_s=0.45, ttft_s=0.5,
        itl_s=0.025, running=20.0, kv_ratio=0.28, request_s=10.5, steps_per_s=40.0,
        step_tokens=170.0,
    )  # fmt: skip


INCIDENTS = (
    never_scaled_out(incident("one decodes on, none is admitted", "sglang 14400", one_decodes_on,
                              "engine_stalled")),
    never(incident("answers of ten minutes fill the seats", "the same, with full seats",
                   long_answers_fill_the_seats, "admission_limit"), "engine_stalled"),
    never(milder(incident("a decode server computes prompts itself", "vllm 40364",
                          computes_prompts_itself, "kv_transfer_slow")), "slow_steps"),
)  # fmt: skip
