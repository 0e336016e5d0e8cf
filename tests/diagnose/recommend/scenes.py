"""Servers and loads made by hand, and what is recommended for them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated, deployment
from kneewatch.diagnose.ranking import CAUSES
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.adviser import recommend
from kneewatch.diagnose.recommend.demand import QueueTrend
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.rule import Severity
from tests.diagnose.situations import CALM, Situation

PAGE: Mapping[str, str] = {
    "block_size": "16",
    "num_gpu_blocks": "10001",
    "cache_dtype": "auto",
    "gpu_memory_utilization": "0.9",
    "enable_prefix_caching": "True",
    "kv_cache_memory_bytes": "None",
    "num_gpu_blocks_override": "None",
}
"""160,000 tokens that requests can hold: 10,000 blocks, and the one that vLLM keeps."""

FULL = CALM.but(
    running=100.0,
    running_avg=100.0,
    running_max=100.0,
    waiting=60.0,
    waiting_avg=60.0,
    waiting_by_capacity=60.0,
    kv_usage_ratio=1.0,
    kv_usage_avg_ratio=1.0,
    kv_usage_max_ratio=1.0,
    preemption_per_s=5.0,
    preemption_ratio_per_s=0.05,
    completed_per_s=4.0,
    prompt_tokens_mean=1200.0,
    prompt_tokens_p99=2500.0,
    output_tokens_mean=784.0,
    output_tokens_p99=1500.0,
    itl_mean_s=0.03,
    ttft_mean_s=3.0,
    generation_tokens_per_s=3000.0,
)
"""160 requests of 1,600 tokens each: 1.6 times what the cache of PAGE holds."""

LLAMA = Stated(
    model=model("meta-llama/Llama-3.1-8B-Instruct"),
    gpu=gpu("h100-sxm"),
    tensor_parallel=1,
    version=(0, 32, 0),
    replicas=2,
)


ADVISED = tuple(record.id for record in CAUSES if record.levers)
"""The causes for which a change can be recommended."""


def cause(cause_id: str) -> Cause:
    """A cause as a diagnosis concludes it."""
    return Cause(
        id=cause_id,
        confidence=0.9,
        severity=Severity.WARNING,
        summary="words",
        evidence=(),
        against=(),
        guide=("9.3",),
        lever="lever",
        since_s=0.0,
    )


def advised(
    *causes: str,
    situation: Situation = FULL,
    page: Mapping[str, str] = PAGE,
    stated: Stated = NOTHING,
    trend: QueueTrend | None = None,
    **labels: str,
) -> dict[str, Advice]:
    """What is recommended, by id, in its order."""
    config = {**page, **labels}
    facts = replace(situation, config=config).facts()
    recommendations = recommend(
        facts, causes, deployment(config, stated), trend=trend, curve=situation.curve
    )
    assert len({advice.id for advice in recommendations}) == len(recommendations)
    return {advice.id: advice for advice in recommendations}


def changes(advice: Advice) -> dict[str, tuple[object, object]]:
    """Before and after, by flag."""
    return {change.flag: (change.before, change.after) for change in advice.changes}
