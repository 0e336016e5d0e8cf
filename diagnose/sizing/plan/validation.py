"""Step 13 of a plan: what production has to show, and what to let in. Pure. Guide 9.1, 9.3, 9.4."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.sizing.benchmark.trust import GPU_SHORTFALL_LIMIT, TTFT_EXCESS_LIMIT
from kneewatch.diagnose.sizing.fleet.admission import circuit_breaker, input_limit, slot_occupancy_s
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.plan.cost import utilization_of
from kneewatch.diagnose.sizing.plan.fleet import fleet_of
from kneewatch.diagnose.sizing.plan.model import PlanStep, Sized, Value, of_tier
from kneewatch.diagnose.sizing.steps import Step, figure

_SOURCE = "guide 9.1 step 13"


def validation_step(sized: Sequence[Sized]) -> PlanStep:
    """Step 13: the first week's limits in this plan's own numbers, and the guardrails."""
    several, output, steps = len(sized) > 1, dict[str, Value](), list[Step]()
    notes: list[str] = []
    to_measure: list[str] = []
    for one in sized:
        prefix = f"{one.pool.name}." if several else ""
        for part in (_limits(one), _guardrails(one)):
            output |= {f"{prefix}{key}": value for key, value in part[0].items()}
            steps.extend(of_tier(one.pool.name, part[1]))
            notes.extend(f"{one.pool.name}: {note}" if several else note for note in part[2])
        if one.pool.deployment.benchmark_gpu_ratio is None:
            to_measure.append("GPU utilization of the benchmark at C_max")
    return PlanStep(
        number=13,
        title="Deploy and validate",
        decision="back to step 1 where the first week crosses a limit",
        output=output,
        steps=tuple(steps),
        to_measure=(
            "TTFT P99, ITL P99, GPU utilization, prefix hits and evictions of the first week",
            *dict.fromkeys(to_measure),
        ),
        notes=tuple(dict.fromkeys(notes)),
    )


_PartResult = tuple[dict[str, Value], list[Step], list[str]]


def _limits(sized: Sized) -> _PartResult:
    output: dict[str, Value] = {}
    steps: list[Step] = []
    notes: list[str] = []
    best, gpu_ratio = sized.point, sized.pool.deployment.benchmark_gpu_ratio
    if best is not None:
        limit = best.ttft_p99_s * (1 + TTFT_EXCESS_LIMIT)
        output["resize_above_ttft_p99_s"] = limit
        steps.append(
            Step(
                title="Re-size above a TTFT P99 of",
                formula="TTFT P99 of step 10 x (1 + 30 %)",
                values=f"{figure(best.ttft_p99_s)} s x {1 + TTFT_EXCESS_LIMIT:g}",
                result=f"{figure(limit)} s at {figure(best.requests_per_s)} requests/s an instance",
                source=_SOURCE,
            )
        )
        if sized.usable_source != "measured":
            notes.append("the TTFT limit is of a prediction: replace it by the benchmark's")
    if gpu_ratio is not None:
        floor = max(gpu_ratio - GPU_SHORTFALL_LIMIT, 0.0)
        output["resize_below_gpu_ratio"] = floor
        steps.append(
            Step(
                title="Re-size below a GPU utilization of",
                formula="GPU utilization of the benchmark - 20 points, at equal RPS",
                values=f"{gpu_ratio:.0%} - {GPU_SHORTFALL_LIMIT * 100:.0f} points",
                result=f"{floor:.0%}",
                source=_SOURCE,
            )
        )
    fleet = fleet_of(sized)
    if fleet is not None and sized.usable_requests_per_s is not None:
        per_instance = sized.pool.peak_requests_per_s / fleet.deployed_instances
        output["expected_peak_requests_per_s_per_instance"] = per_instance
        output["expected_utilization_ratio"] = utilization_of(sized, fleet)
    return output, steps, notes


def _guardrails(sized: Sized) -> _PartResult:
    pool, best = sized.pool, sized.point
    lengths = pool.lengths
    longest = sized.setup.longest_tokens
    limit = input_limit(
        p95_input_tokens=lengths.input_p95_tokens,
        p99_input_tokens=lengths.input_p99_tokens,
        max_model_len=max(longest - lengths.output_p99_tokens, 1),
    )
    output: dict[str, Value] = {
        "max_model_len": longest,
        "max_input_tokens": limit.low_tokens,
        "max_output_tokens": max(longest - limit.low_tokens, lengths.output_p99_tokens),
    }
    steps = list(limit.steps)
    notes: list[str] = []
    if best is not None:
        output["p99_output_slot_s"] = slot_occupancy_s(
            output_tokens=lengths.output_p99_tokens, itl_s=best.itl_p99_s
        )
    target, fleet = pool.profile.slo.ttft_p99_s, fleet_of(sized)
    if target is None or fleet is None or sized.usable_requests_per_s is None:
        notes.append("no circuit breaker: it needs a TTFT target and a fleet")
        return output, steps, notes
    try:
        breaker = circuit_breaker(
            ttft_target_s=target,
            arrivals_per_s=pool.peak_requests_per_s,
            served_per_s=fleet.deployed_instances * sized.usable_requests_per_s,
            quiet_ttft_s=sized.quiet_ttft_s or 0.0,
        )
    except SizingError as error:
        return output, steps, [*notes, f"no circuit breaker: {error}"]
    output["queue_limit_low"] = breaker.low_requests
    output["queue_limit_high"] = breaker.high_requests
    return output, [*steps, *breaker.steps], notes
