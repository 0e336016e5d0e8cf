"""Steps 1 and 2 of a plan: the workload, and the GPU for it. Pure. Guide 9.1, chapter 1, 3.5."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.sizing.fleet.workload import TARGETS, archetype, session_tokens
from kneewatch.diagnose.sizing.plan.model import (
    PlanStep,
    Pool,
    Value,
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.diagnose.sizing.plan.profile import Lengths, WorkloadProfile
from kneewatch.diagnose.sizing.steps import Step, figure

_NO_SLO = "no TTFT or ITL target is stated: C_max, and with it the fleet, cannot be decided"


def workload_step(profile: WorkloadProfile) -> PlanStep:
    """Step 1: the lengths, rates and targets that every later step takes."""
    traffic, slo = profile.traffic, profile.slo
    lengths = call_lengths(profile.lengths, profile.session)
    kind, target = archetype(traffic.archetype), TARGETS[traffic.kind]
    average, peak = average_requests_per_s(profile), planned_peak_per_s(profile)
    notes = [f"{traffic.archetype}: bound by {kind.bottleneck}; watch {kind.slo}"]
    if slo.ttft_p99_s is None and slo.itl_p99_s is None and traffic.kind == "online":
        notes.append(_NO_SLO)
    elif traffic.kind == "online":
        for name, value in (("TTFT", slo.ttft_p99_s), ("ITL", slo.itl_p99_s)):
            if value is None:
                notes.append(f"no {name} target is stated: it does not bound C_max")
    if average is None:
        notes.append("no average rate is stated: cost per token needs it, or a utilization")
    output: dict[str, Value] = {
        "archetype": traffic.archetype,
        "kind": traffic.kind,
        "input_mean_tokens": lengths.mean_input_tokens,
        "output_mean_tokens": lengths.mean_output_tokens,
        "input_p95_tokens": lengths.input_p95_tokens,
        "output_p95_tokens": lengths.output_p95_tokens,
        "average_requests_per_s": average,
        "planned_peak_requests_per_s": peak,
        "ttft_p99_slo_s": slo.ttft_p99_s,
        "itl_p99_slo_s": slo.itl_p99_s,
    }
    return PlanStep(
        number=1,
        title="Characterize the workload",
        decision=f"optimise {target.optimize}; operate at: {target.operating_point}",
        output=output,
        steps=(
            *_rate_steps(profile),
            *_mean_steps(profile.lengths),
            *_session_steps(profile, lengths),
        ),
        to_measure=_unmeasured(profile),
        notes=tuple(notes),
    )


def _rate_steps(profile: WorkloadProfile) -> list[Step]:
    traffic, steps = profile.traffic, list[Step]()
    average, planned = average_requests_per_s(profile), planned_peak_per_s(profile)
    peak = planned / (1 + traffic.growth_ratio)
    if traffic.batch_requests is not None and traffic.batch_window_s is not None:
        steps.append(
            Step(
                title="Rate of the batch",
                formula="requests / window",
                values=f"{figure(traffic.batch_requests)} / {figure(traffic.batch_window_s)} s",
                result=f"{figure(peak)} requests/s",
                source="guide 1.4",
            )
        )
    elif average is not None:
        steps.append(
            Step(
                title="Peak over average",
                formula="peak RPS / average RPS",
                values=f"{figure(peak)} / {figure(average)}",
                result=figure(peak / average),
                source="guide 1.3",
            )
        )
    if traffic.growth_ratio:
        steps.append(
            Step(
                title="Planned peak",
                formula="peak RPS x (1 + growth)",
                values=f"{figure(peak)} x (1 + {figure(traffic.growth_ratio)})",
                result=f"{figure(planned)} requests/s",
                source="guide 1.3",
            )
        )
    return steps


def _mean_steps(lengths: Lengths) -> list[Step]:
    steps: list[Step] = []
    if lengths.input_mean_tokens is None:
        steps.append(
            _mean_step(
                "input",
                p50=lengths.input_p50_tokens,
                p95=lengths.input_p95_tokens,
                mean=lengths.mean_input_tokens,
            )
        )
    if lengths.output_mean_tokens is None:
        steps.append(
            _mean_step(
                "output",
                p50=lengths.output_p50_tokens,
                p95=lengths.output_p95_tokens,
                mean=lengths.mean_output_tokens,
            )
        )
    return steps


def _mean_step(side: str, *, p50: float, p95: float, mean: float) -> Step:
    return Step(
        title=f"Mean {side}, estimated",
        formula="P50 x exp((ln(P95 / P50) / 1.645)^2 / 2)",
        values=f"{figure(p50)} x exp((ln({figure(p95)} / {figure(p50)}) / 1.645)^2 / 2)",
        result=f"{figure(mean)} tokens",
        source="mean of a log-normal distribution with this P50 and P95",
    )


def _session_steps(profile: WorkloadProfile, grown: Lengths) -> list[Step]:
    session, first = profile.session, profile.lengths
    if session is None:
        return []
    later, outputs = session.calls - 1, first.mean_output_tokens
    each = f"({session.added_tokens:,} + {figure(outputs)})"
    whole = session_tokens(
        calls=session.calls,
        first_prompt_tokens=round(first.mean_input_tokens),
        added_tokens=session.added_tokens,
        output_tokens=round(outputs),
    )
    return [
        Step(
            title="Input of a session's mean call",
            formula="mean of the first + (calls - 1) / 2 x (added + output)",
            values=f"{figure(first.mean_input_tokens)} + {later} / 2 x {each}",
            result=f"{figure(grown.mean_input_tokens)} tokens",
            source="guide 1.2",
        ),
        Step(
            title="P95 input of a session's last call",
            formula="P95 of the first + (calls - 1) x (added + output)",
            values=f"{first.input_p95_tokens:,} + {later} x {each}",
            result=f"{grown.input_p95_tokens:,} tokens",
            source="guide 1.2",
        ),
        Step(
            title="Prompt tokens of a whole session",
            formula="sum over its calls; and with everything before a call cached",
            values=f"{session.calls} calls",
            result=f"{whole.prefill_tokens:,}; {whole.prefill_tokens_cached:,} cached",
            source="guide 1.2; prefix caching: 7.2",
        ),
    ]


def _unmeasured(profile: WorkloadProfile) -> tuple[str, ...]:
    lengths, wanted = profile.lengths, list[str]()
    for side, stated in (
        ("input", lengths.input_mean_tokens),
        ("output", lengths.output_mean_tokens),
    ):
        if stated is None:
            wanted.append(f"mean {side} length: it is estimated as of a log-normal distribution")
    if profile.traffic.predictability is None:
        wanted.append("how predictable the traffic is: taken as uncertain")
    if profile.traffic.lowest_requests_per_s is None:
        wanted.append("the rate of the quietest hour, for the warm minimum")
    return tuple(wanted)


def resource(gpu: Gpu, wanted: str) -> tuple[float, str]:
    """What a GPU has of what an archetype asks for (compute, bandwidth or memory), as a word."""
    if wanted == "compute":
        peak = gpu.fp8_flop_per_s or gpu.bf16_flop_per_s
        return peak, f"{figure(peak / 1e12)} TFLOP/s"
    if wanted == "bandwidth":
        rate = gpu.memory_bandwidth_bytes_per_s
        return rate, f"{figure(rate / 1e12)} TB/s"
    return gpu.memory_bytes, f"{figure(gpu.memory_bytes / 1e9)} GB"


def choose_gpu(candidates: Sequence[Gpu], *, wanted: str) -> Gpu:
    """The candidate with most of what the archetype asks for; of equals the cheaper.

    Source: guide 3.5 and 9.1 step 2 (compute for prefill, bandwidth for decode).
    """
    return max(candidates, key=lambda gpu: (resource(gpu, wanted)[0], -gpu.usd_per_hour))


def hardware_step(pools: Sequence[Pool], candidates: Sequence[Sequence[Gpu]]) -> PlanStep:
    """Step 2: the GPU of each fleet, of those that could be had."""
    wanted = archetype(pools[0].profile.traffic.archetype).hardware
    several, output, steps = len(pools) > 1, dict[str, Value](), list[Step]()
    for pool, known in zip(pools, candidates, strict=True):
        gpu, prefix = pool.gpu, f"{pool.name}." if several else ""
        output[f"{prefix}gpu"] = gpu.id
        output[f"{prefix}memory_bytes"] = gpu.memory_bytes
        output[f"{prefix}link"] = "nvlink" if gpu.nvlink_bytes_per_s else "pcie"
        output[f"{prefix}linked_gpus"] = gpu.nvlink_gpus
        output[f"{prefix}usd_per_gpu_hour"] = pool.usd_per_gpu_hour
        if len(known) > 1:
            steps.append(
                Step(
                    title=f"Most {wanted}" + (f" for {pool.name}" if several else ""),
                    formula="greatest of the candidates",
                    values=", ".join(f"{one.id} {resource(one, wanted)[1]}" for one in known),
                    result=gpu.id,
                    source="guide 9.1 step 2, 3.5; catalogue of GPUs",
                )
            )
    notes = [f"{pool.gpu.id}: {pool.gpu.note}" for pool in pools if pool.gpu.note]
    notes += [
        f"{pool.gpu.id}: no NVLink, so tensor parallelism beyond 2 is not planned"
        for pool in pools
        if pool.gpu.nvlink_bytes_per_s is None
    ]
    if all(len(known) == 1 for known in candidates):
        notes.append("one candidate is stated: nothing was compared")
    return PlanStep(
        number=2,
        title="Select the hardware",
        decision=", ".join(dict.fromkeys(pool.gpu.name for pool in pools)) + f" (for {wanted})",
        output=output,
        steps=tuple(steps),
        to_measure=("the price that is really paid per GPU-hour",)
        if any(pool.deployment.usd_per_gpu_hour is None for pool in pools)
        else (),
        notes=tuple(dict.fromkeys(notes)),
    )
