"""Queues: who waits for what, how long, and how bad it is."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, STEP_S, Load

LASTS_S, SURE_S = 300.0, 60.0
QUIET_S, RAMP_S = 120.0, 380.0
GIANT = replace(
    SERVING,
    running=8.0,
    waiting=200.0,
    first_tokens_per_s=2.0,
    finished_per_s=2.0,
    blocks=60,
    block_tokens=128,
    giant_share=0.03,
    giant_tokens=1900.0,
)
"""A cache of 7,680 tokens; chat of 100 tokens waits behind prompts of 1,900."""


def giants(at_s: float) -> Load:
    """KV usage moves between 42 and 100% as giants come and go."""
    usage = (1.0, 0.92, 0.76, 0.42, 0.97, 0.88, 0.8, 1.0, 0.7, 0.95)
    running = (8.0, 5.0, 7.0, 4.0, 8.0, 6.0)
    step = round(at_s / STEP_S)
    return replace(GIANT, kv_ratio=usage[step % len(usage)], running=running[step % len(running)])


def slow_ramp(at_s: float) -> Load:
    """3 to 22 requests over 380 s after a quiet minute; usage swings by a tenth."""
    climbed = min(1.0, max(0.0, (at_s - QUIET_S) / RAMP_S))
    requests = 3 + 19 * climbed
    swing = 0.9 + 0.2 * (round(at_s / STEP_S) % 2)
    return replace(SERVING, running=round(requests), kv_ratio=0.042 * requests * swing)


def evening(at_s: float) -> Load:
    """The same climb to two thirds of it, and there the load stays."""
    return slow_ramp(min(at_s, QUIET_S + 0.6 * RAMP_S))


def bursts(at_s: float) -> Load:
    """A batch of calls every 30 s: one scrape in six sees a queue."""
    return replace(SERVING, waiting=0.0 if round(at_s / STEP_S) % 6 else 20.0)


def long_prompts(at_s: float) -> Load:
    """The log of an issue: prompts of 12,000 tokens arrive as others end, and usage follows."""
    step = round(at_s / STEP_S) % 4
    return Load(
        running=(18.0, 18.0, 21.0, 20.0)[step],
        waiting=(43.0, 42.0, 33.0, 23.0)[step],
        kv_ratio=(0.959, 0.955, 0.877, 0.984)[step],
        generated_per_s=(1055.0, 1226.0, 735.0, 590.0)[step],
        prompt_per_s=(0.0, 0.0, 12_069.0, 18_033.0)[step],
        first_tokens_per_s=(0.0, 0.0, 1.0, 1.4)[step],
        finished_per_s=0.6,
        ttft_s=40.0,
        request_s=70.0,
        prompt_tokens=12_000.0,
        blocks=20_000,
    )


def all_wait(at_s: float) -> Load:
    """After an offload of KV blocks every request waits and none runs; the cache is empty."""
    return SERVING if at_s < QUIET_S else Load(waiting=50.0)


INCIDENTS = (
    Incident(
        name="usage of 88 to 98%, prompts of 12,000 tokens",
        source="vllm 43295",
        load_at=long_prompts,
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="kv_pressure",
        least=Severity.WARNING,
    ),
    Incident(
        name="50 wait, none runs, the cache is empty",
        source="vllm 42371",
        load_at=all_wait,
        lasts_s=LASTS_S,
        judged_from_s=QUIET_S + SURE_S,
        first_cause="engine_stalled",
    ),
    Incident(
        name="clients hang up after 2 s, nobody is answered",
        source="vLLM 0.32 on CPU, 6 seats",
        load_at=lambda _: Load(
            running=3.0, waiting=14.0, kv_ratio=0.3, accepted_per_s=9.2, first_tokens_per_s=4.6,
            generated_per_s=90.0, prompt_per_s=400.0,
        ),
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="queue_saturation",
        says="expected wait 3.0 s; clients give up 100%",
    ),
    Incident(
        name="e2e finishes 4/s, no request_success",
        source="a page from the wild",
        load_at=lambda _: replace(
            SERVING, waiting=20.0, finished_per_s=None, first_tokens_per_s=4.0, answered_per_s=4.0
        ),
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="queue_saturation",
        least=Severity.WARNING,
        says="Requests queue for capacity: 20 requests queued, expected wait 5.0 s",
    ),
    Incident(
        name="a queue at one scrape in six",
        source="a page from the wild",
        load_at=bursts,
        lasts_s=LASTS_S,
        judged_from_s=0.0,
        first_cause=NOTHING,
    ),
    Incident(
        name="a slow ramp, 100 s before the first eviction",
        source="vLLM 0.32 on CPU, 3 to 22 requests",
        load_at=slow_ramp,
        lasts_s=QUIET_S + 0.95 * RAMP_S,
        judged_from_s=QUIET_S + 0.7 * RAMP_S,
        first_cause="kv_exhaustion_ahead",
        least=Severity.WARNING,
    ),
    Incident(
        name="a climb that has ended: a load that stays",
        source="healthy",
        load_at=evening,
        lasts_s=900.0,
        judged_from_s=QUIET_S + 0.6 * RAMP_S + 180,
        first_cause=NOTHING,
    ),
    Incident(
        name="giant requests among chat",
        source="vLLM 0.32 on CPU, 60 blocks",
        load_at=giants,
        lasts_s=LASTS_S,
        judged_from_s=SURE_S,
        first_cause="kv_pressure",
        says="of the KV cache each",
    ),
)  # fmt: skip
