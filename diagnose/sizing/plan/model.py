"""What a plan is made of: its steps, and the fleets that it sizes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.fleet.admission import input_limit
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.plan.profile import (
    Deployment,
    Lengths,
    SessionShape,
    WorkloadProfile,
)
from kneewatch.diagnose.sizing.steps import Step

Value = float | int | str | bool | None

_LENGTH_ROUNDING_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One of the guide's thirteen decisions.

    `output` is by name with its unit, None where it cannot be known yet; `steps` is the
    arithmetic; `to_measure` is what only a measurement can say. `tier` is empty where the
    decision is for all of the traffic.
    """

    number: int
    title: str
    decision: str
    output: Mapping[str, Value]
    steps: tuple[Step, ...] = ()
    to_measure: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tier: str = ""


def counted(count: int, noun: str) -> str:
    """The count with its noun: 1 GPU, 2 GPUs."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def of_tier(name: str, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The arithmetic with the tier's name in front, where there is one."""
    return tuple(replace(s, title=f"{name}: {s.title}") if name else s for s in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The thirteen steps in order; with tiers, steps 4 to 10 come once for each of them."""

    profile: WorkloadProfile
    tiers: tuple[str, ...]
    steps: tuple[PlanStep, ...]

    def step(self, number: int, tier: str = "") -> PlanStep:
        """The step of that number, of a tier where it has several.

        Raises:
            KeyError: there is none.
        """
        for step in self.steps:
            if step.number == number and step.tier == tier:
                return step
        raise KeyError(f"step {number} {tier}".strip())

    @property
    def instances(self) -> int | None:
        """Instances to deploy; None where usable RPS is not known."""
        return _count(self.step(11).output["instances"])

    @property
    def gpus(self) -> int | None:
        """GPUs to deploy; None where usable RPS is not known."""
        return _count(self.step(11).output["gpus"])


def _count(value: Value) -> int | None:
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One fleet to be sized: a model on a GPU, the lengths of its calls, its share of traffic.

    `share_ratio` is of the requests that arrive; `peak_requests_per_s` includes the growth.
    """

    name: str
    profile: WorkloadProfile
    deployment: Deployment
    lengths: Lengths
    model: Model
    gpu: Gpu
    share_ratio: float
    peak_requests_per_s: float

    @property
    def tail_tokens(self) -> int:
        """Input and output at P95: the request that memory is planned with."""
        return self.lengths.input_p95_tokens + self.lengths.output_p95_tokens

    @property
    def average_requests_per_s(self) -> float | None:
        """This fleet's share of the average; None where that is not stated."""
        average = average_requests_per_s(self.profile)
        return None if average is None else average * self.share_ratio

    @property
    def usd_per_gpu_hour(self) -> float:
        """The stated price, else the catalogue's default."""
        stated = self.deployment.usd_per_gpu_hour
        return self.gpu.usd_per_hour if stated is None else stated


def average_requests_per_s(profile: WorkloadProfile) -> float | None:
    """The stated average, or a batch's own rate."""
    traffic = profile.traffic
    if traffic.batch_requests is not None and traffic.batch_window_s is not None:
        return traffic.batch_requests / traffic.batch_window_s
    return traffic.average_requests_per_s


def planned_peak_per_s(profile: WorkloadProfile) -> float:
    """The peak to size for: the stated one, or a batch's own rate, and the growth."""
    peak = profile.traffic.peak_requests_per_s or average_requests_per_s(profile)
    if peak is None:
        raise SizingError("the profile has no peak", name="peak_requests_per_s")
    return peak * (1 + profile.traffic.growth_ratio)


def call_lengths(lengths: Lengths, session: SessionShape | None) -> Lengths:
    """The lengths of all calls of a session, from those of its first call.

    Each call's input holds the earlier outputs and what was added. The mean call is in the middle
    of the session; P95 and P99 are of its last call.
    Source: guide 1.2 (the session is the unit of sizing).
    """
    if session is None:
        return lengths
    later = session.calls - 1
    grown = session.added_tokens + lengths.mean_output_tokens
    last = math.ceil(later * grown)
    return replace(
        lengths,
        input_p50_tokens=lengths.input_p50_tokens + math.ceil(later * grown / 2),
        input_p95_tokens=lengths.input_p95_tokens + last,
        input_p99_tokens=lengths.input_p99_tokens + last,
        input_mean_tokens=lengths.mean_input_tokens + later * grown / 2,
    )


def longest_request_tokens(pool: Pool) -> int:
    """`max_model_len` to launch with: stated, or the input limit and the P99 output.

    Raises:
        SizingError: today's P99 lengths do not fit the model, or the stated length.
    Source: guide 9.4 (the operational limit is not the model's).
    """
    lengths, own = pool.lengths, pool.model.max_context_tokens
    needed = lengths.input_p99_tokens + lengths.output_p99_tokens
    limit = pool.deployment.max_model_len or own
    if limit and needed > limit:
        raise SizingError(
            f"P99 requests take {needed:,} tokens, more than the {limit:,} that "
            f"{pool.model.id} is allowed",
            name="max_model_len",
        )
    if pool.deployment.max_model_len:
        return pool.deployment.max_model_len
    allowed = input_limit(
        p95_input_tokens=lengths.input_p95_tokens, p99_input_tokens=lengths.input_p99_tokens
    )
    wanted = max(allowed.low_tokens + lengths.output_p99_tokens, needed)
    rounded = math.ceil(wanted / _LENGTH_ROUNDING_TOKENS) * _LENGTH_ROUNDING_TOKENS
    return min(rounded, own) if own else rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one instance does at a concurrency; P99s measured, or from the roofline."""

    concurrency: float
    requests_per_s: float
    ttft_p99_s: float
    itl_p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A fleet after step 10. `usable_source` is measured, predicted, stated or unknown.

    `point` is one instance at C_max, None where no concurrency is known to keep the targets;
    `quiet_ttft_s` is the P99 prompt's prefill in an empty instance.
    """

    pool: Pool
    setup: Setup
    memory: Memory
    steps: tuple[PlanStep, ...]
    usable_requests_per_s: float | None
    usable_source: str
    point: Point | None
    quiet_ttft_s: float | None
    hit_ratio: float | None = None

    @property
    def gpus_each(self) -> int:
        """GPUs of one instance."""
        return self.setup.parallel.gpus
