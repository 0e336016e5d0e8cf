"""A batch of incidents and odd but healthy servers, written down before kneewatch had seen their
pages: what it said wrongly of them."""

from __future__ import annotations

from msgspec.structs import replace

from tests.incidents.held_out import BEGINS_S, CHAT
from tests.incidents.incident import NOTHING
from tests.incidents.pages import Load
from tests.incidents.second_held_out import incident, milder, never, never_scaled_out

OFFLOADED = replace(
    CHAT, running=19.0, kv_ratio=0.17, generated_per_s=1200.0, itl_s=0.015, answer_tokens=200.0,
    first_tokens_per_s=6.0, finished_per_s=6.0, request_s=3.1, prompt_per_s=24_000.0,
    prompt_tokens=4000.0, queued_s=0.005, prefill_s=0.12, ttft_s=0.125, hit_ratio=0.5,
    tier_lookups_per_s=12_000.0, tier_hit_ratio=0.6, blocks=30_000, steps_per_s=66.0,
    step_tokens=90.0, deferred=0.0,
)  # fmt: skip
"""A busy server that finds prompts in another cache tier."""


def three_never_loaded(at_s: float) -> Load:
    """Loads of three requests are never answered; hundreds of others a minute are served."""
    return OFFLOADED if at_s < BEGINS_S else replace(OFFLOADED, deferred=3.0, kv_ratio=0.195)


LOADS_TAKE_TURNS = replace(OFFLOADED, deferred=3.0, queued_s=0.5, ttft_s=0.62, request_s=3.6)
"""Some wait for their load at any time, each as long as those that are served."""

TIER_NEAR = replace(
    CHAT, running=3.5, kv_ratio=0.05, generated_per_s=145.0, itl_s=0.02, answer_tokens=100.0,
    first_tokens_per_s=1.45, finished_per_s=1.45, request_s=3.1, prompt_per_s=14_500.0,
    prompt_tokens=10_000.0, queued_s=0.65, prefill_s=0.35, ttft_s=1.0, hit_ratio=0.3,
    tier_lookups_per_s=10_150.0, tier_hit_ratio=0.97, blocks=40_000, steps_per_s=45.0,
    step_tokens=10.0, waiting=0.0, deferred=None,
)  # fmt: skip


def from_a_far_tier(at_s: float) -> Load:
    """Prefixes come from a slow store: four wait, hardly one runs, and no page says why."""
    if at_s < BEGINS_S:
        return TIER_NEAR
    runs = at_s % 20.0 < STEP_OF_TWENTY
    return replace(
        TIER_NEAR, running=float(runs), waiting=4.0, kv_ratio=0.01 * runs, generated_per_s=9.7,
        first_tokens_per_s=0.097, finished_per_s=0.097, request_s=41.0, prompt_per_s=970.0,
        tier_lookups_per_s=970.0, hit_ratio=0.0, queued_s=38.3, ttft_s=38.7, steps_per_s=9.0,
        step_tokens=2.0,
    )  # fmt: skip


STEP_OF_TWENTY = 5.0
"""One scrape of four sees a request that runs."""

BY_DAY = replace(
    CHAT, running=2.6, kv_ratio=0.01, generated_per_s=300.0, itl_s=0.0085, answer_tokens=150.0,
    first_tokens_per_s=2.0, finished_per_s=2.0, request_s=1.3, prompt_per_s=1000.0,
    prompt_tokens=500.0, queued_s=0.003, prefill_s=0.022, ttft_s=0.025, steps_per_s=110.0,
    step_tokens=9.0, blocks=20_000,
)  # fmt: skip


def evening(at_s: float) -> Load:
    """A request each ten seconds: the idle GPU wakes for each, in 36 ms."""
    if at_s < BEGINS_S:
        return BY_DAY
    return replace(
        BY_DAY, running=0.15, generated_per_s=15.0, first_tokens_per_s=0.1, finished_per_s=0.1,
        prompt_per_s=50.0, prefill_s=0.058, ttft_s=0.061, request_s=1.4, steps_per_s=15.0,
        step_tokens=3.3,
    )  # fmt: skip


POOL = replace(
    CHAT, running=2.4, kv_ratio=0.02, generated_per_s=160.0, itl_s=0.015, answer_tokens=200.0,
    first_tokens_per_s=0.8, finished_per_s=0.8, request_s=3.0, blocks=20_000,
    accepted_per_s=0.8, server_errors_per_s=0.0,
)  # fmt: skip


def server_gives_up(at_s: float) -> Load:
    """The server aborts a third of the requests and answers their calls with HTTP 5xx."""
    if at_s < BEGINS_S:
        return POOL
    return replace(
        POOL, running=4.0, finished_per_s=0.5, first_tokens_per_s=0.5, generated_per_s=100.0,
        aborted_per_s=0.3, accepted_per_s=0.5, server_errors_per_s=0.3,
    )  # fmt: skip


INCIDENTS = (
    replace(
        never_scaled_out(milder(incident("three wait for a KV load that never ends", "LMCache 5047",
                                         three_never_loaded, "kv_transfer_slow"))),
        lasts_s=BEGINS_S + 420.0, judged_from_s=BEGINS_S + 260.0,
    ),
    replace(
        never(incident("as many wait, and all are served", "healthy; LMCache 5047",
                       lambda _: LOADS_TAKE_TURNS, NOTHING), "kv_transfer_slow"),
        judged_from_s=0.0,
    ),
    never_scaled_out(milder(incident("prefixes come from a slow store", "LMCache 1293",
                                     from_a_far_tier, "kv_transfer_slow"))),
    replace(
        incident("a GPU that idles between calls", "healthy; vllm 31602", evening, NOTHING),
        step_s=30.0, lasts_s=BEGINS_S + 600.0,
    ),
    never(incident("the server gives up, not the clients", "tokenspeed 1427", server_gives_up,
                   "requests_failing"), "clients_give_up"),
)  # fmt: skip
