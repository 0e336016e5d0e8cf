"""What a workload profile holds, table by table. Pure.

Source: guide 9.1 step 1 and chapter 1; docs/plan.md says what each key means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z95 = 1.6449
"""The 95th percentile of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of inputs and outputs; a mean that is not stated is estimated."""

    input_p50_tokens: int
    input_p95_tokens: int
    input_p99_tokens: int
    output_p50_tokens: int
    output_p95_tokens: int
    output_p99_tokens: int
    input_mean_tokens: float | None = None
    output_mean_tokens: float | None = None

    @property
    def mean_input_tokens(self) -> float:
        """The stated mean, or that of a log-normal distribution with this P50 and P95."""
        stated = self.input_mean_tokens
        return stated or _mean(p50=self.input_p50_tokens, p95=self.input_p95_tokens)

    @property
    def mean_output_tokens(self) -> float:
        """The stated mean, or that of a log-normal distribution with this P50 and P95."""
        stated = self.output_mean_tokens
        return stated or _mean(p50=self.output_p50_tokens, p95=self.output_p95_tokens)


def _mean(*, p50: float, p95: float) -> float:
    return p50 * math.exp((math.log(p95 / p50) / _Z95) ** 2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests: how many, when, and how well that is known."""

    kind: str
    archetype: str
    average_requests_per_s: float | None = None
    peak_requests_per_s: float | None = None
    lowest_requests_per_s: float | None = None
    rise_per_s_per_s: float | None = None
    growth_ratio: float = 0.0
    predictability: str | None = None
    utilization_ratio: float | None = None
    batch_requests: float | None = None
    batch_window_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets at P99; None: none was set."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is known of the launch; None: the plan decides, or does without."""

    model: str
    gpus: tuple[str, ...]
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_model_len: int | None = None
    concurrency: int | None = None
    usable_requests_per_s: float | None = None
    usd_per_gpu_hour: float | None = None
    baseline_benchmark: str | None = None
    final_benchmark: str | None = None
    benchmark_gpu_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix that requests share; `hit_ratio` None: not measured, so not counted on."""

    shared_tokens: int
    distinct: int = 1
    hit_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of the model, of which so many are in one batch at most.

    `max_lora_rank` is what vLLM keeps buffers for; the bytes of one are stated without it.
    """

    adapters: int
    max_simultaneous_adapters: int
    adapter_bytes: float = 0.0
    max_lora_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A draft's length and, measured, its acceptance per token and its cost."""

    draft_tokens: int
    acceptance_ratio: float
    draft_cost_ratio: float = 0.0
    draft_weights_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """Dependent calls of an agentic session, each adding tokens to the context."""

    calls: int
    added_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Nodes and what joins them."""

    node_gpus: int = 8
    network: str | None = None
    storage_path: str | None = None
    provision_s: float | None = None
    initialise_s: float | None = None
    host_memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How requests are dealt to tiers: route, cascade or hardware."""

    method: str = "route"
    simple_ratio: float | None = None
    small_model_acceptable: bool | None = None
    router_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierProfile:
    """A tier: its share of the requests, or what it hands on, and its own launch and lengths."""

    name: str
    deployment: Deployment
    lengths: Lengths
    share_ratio: float | None = None
    escalation_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Everything that the thirteen steps take; None: not stated."""

    name: str
    lengths: Lengths
    traffic: Traffic
    deployment: Deployment
    slo: Slo
    hosting: Hosting
    routing: Routing
    prefix: Prefix | None = None
    lora: Lora | None = None
    speculation: Speculation | None = None
    session: SessionShape | None = None
    tiers: tuple[TierProfile, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the profile names, each once."""
        launches = [self.deployment, *(tier.deployment for tier in self.tiers)]
        return tuple(dict.fromkeys(launch.model for launch in launches))

    @property
    def benchmark_files(self) -> tuple[str, ...]:
        """The benchmark tables that the profile names, each once."""
        launches = [self.deployment, *(tier.deployment for tier in self.tiers)]
        named = [n for d in launches for n in (d.baseline_benchmark, d.final_benchmark)]
        return tuple(dict.fromkeys(name for name in named if name is not None))
