"""How many replicas and GPUs a peak, or its prefill and decode token rates, need. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

from kneewatch.diagnose.catalogue.inputs import SizingError, positive, within
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure

SAFETY_DEFAULT = 1.3
"""The guide's worked example (figure 8.2); 1.2 for stable traffic, 1.5 for new deployments, highly
variable inputs or severe SLO violations (guide 8.3)."""


_NORMAL_FROM = 1e4
"""Mean arrivals from which a normal distribution stands in: within one arrival in a hundred."""


def whole(name: str, value: float) -> int:
    """The count as an integer of 1 or more.

    Raises:
        SizingError: it is not one.
    """
    positive(name, value)
    if value != int(value):
        raise SizingError(f"{name} is {value:g}; it must be a whole number", name=name)
    return int(value)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """A fleet for a peak; the `_exact` figures are before any rounding up.

    `instances` carry the peak without margin, `instances_exact` of them would do. The guide gives
    the margin twice: on GPUs (8.3: `gpus_exact` = instances x GPUs each x safety, which need not
    be a whole instance) and on instances (9.1 step 11). `deployed_instances` rounds the second up,
    and `gpus` is what that takes: whole instances, so it is at least `gpus_exact`.
    `gpus_rounded_once` is the same with the margin taken before the first rounding: the fewest
    GPUs that still hold peak x safety.
    """

    instances_exact: float
    instances: int
    gpus_exact: float
    deployed_instances: int
    gpus: int
    gpus_rounded_once: int
    headroom_ratio: float
    spare_instances: int
    steps: tuple[Step, ...]


def size_fleet(
    *,
    peak_requests_per_s: float,
    usable_requests_per_s: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    safety: float = SAFETY_DEFAULT,
) -> FleetSize:
    """The fleet that carries the peak at the usable requests/s of one instance, with a margin.

    `safety` is a factor (1.3 adds 30 %). `headroom_ratio` is the deployed capacity above the
    peak; `spare_instances` may be missing at the peak without breaking the targets.

    Raises:
        SizingError: a rate or count is not positive, or the safety is below 1.
    Source: guide 8.3 step 3 and figure 8.2; 9.1 step 11.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("usable_requests_per_s", usable_requests_per_s)
    gpus_each = whole("tensor_parallel", tensor_parallel) * whole(
        "pipeline_parallel", pipeline_parallel
    )
    if not 1 <= safety <= 10:
        raise SizingError(
            f"safety is {safety:g}; it must be a factor from 1 to 10 (1.3 adds 30%)",
            name="safety",
            choices=("1.2", "1.3", "1.5"),
        )
    needed = exact(peak_requests_per_s) / exact(usable_requests_per_s)
    instances = math.ceil(needed)
    deployed = math.ceil(instances * exact(safety))
    capacity = deployed * exact(usable_requests_per_s)
    return FleetSize(
        instances_exact=float(needed),
        instances=instances,
        gpus_exact=float(instances * gpus_each * exact(safety)),
        deployed_instances=deployed,
        gpus=deployed * gpus_each,
        gpus_rounded_once=math.ceil(needed * exact(safety)) * gpus_each,
        headroom_ratio=float(capacity / exact(peak_requests_per_s) - 1),
        spare_instances=deployed - instances,
        steps=_fleet_steps(
            f"ceil({figure(peak_requests_per_s)} / {figure(usable_requests_per_s)}) "
            f"= ceil({figure(float(needed))})",
            instances=instances,
            deployed=deployed,
            gpus_each=gpus_each,
            safety=safety,
        ),
    )


def _fleet_steps(
    quotient: str, *, instances: int, deployed: int, gpus_each: int, safety: float
) -> tuple[Step, ...]:
    by_gpus = float(instances * gpus_each * exact(safety))
    return (
        Step(
            title="Instances for the peak",
            formula="ceil(peak RPS / usable RPS)",
            values=quotient,
            result=f"{instances}",
            source="guide 8.3 step 3",
        ),
        Step(
            title="Instances with safety",
            formula="ceil(instances x safety)",
            values=f"ceil({instances} x {figure(safety)})",
            result=f"{deployed}",
            source="guide 9.1 step 11",
        ),
        Step(
            title="GPUs",
            formula="instances with safety x GPUs of one instance",
            values=f"{deployed} x {gpus_each}",
            result=f"{deployed * gpus_each} (not rounded to whole instances: {figure(by_gpus)})",
            source="guide 8.3 step 3, 9.1 step 11",
        ),
    )


@dataclass(frozen=True, slots=True)
class PeakSizing:
    """Instances by the average and by the peak; `short_ratio` of the peak the first cannot hold."""

    peak_to_average_ratio: float
    instances_for_average: int
    instances_for_peak: int
    short_ratio: float
    steps: tuple[Step, ...]


def peak_against_average(
    *, average_requests_per_s: float, peak_requests_per_s: float, usable_requests_per_s: float
) -> PeakSizing:
    """What sizing for the average instead of the P95 or P99 peak leaves unserved at the peak.

    Raises:
        SizingError: a rate is not positive, or the peak is below the average.
    Source: guide 1.3.
    """
    for name, value in (
        ("average_requests_per_s", average_requests_per_s),
        ("peak_requests_per_s", peak_requests_per_s),
        ("usable_requests_per_s", usable_requests_per_s),
    ):
        positive(name, value)
    if peak_requests_per_s < average_requests_per_s:
        raise SizingError(
            f"the peak of {peak_requests_per_s:g} requests/s is below the average of "
            f"{average_requests_per_s:g}",
            name="peak_requests_per_s",
        )
    usable = exact(usable_requests_per_s)
    average, peak = exact(average_requests_per_s), exact(peak_requests_per_s)
    by_average, by_peak = math.ceil(average / usable), math.ceil(peak / usable)
    ratio = float(peak / average)
    short = max(0.0, float(1 - by_average * usable / peak))
    step = Step(
        title="Peak over average",
        formula="peak RPS / average RPS",
        values=f"{figure(peak_requests_per_s)} / {figure(average_requests_per_s)}",
        result=f"{figure(ratio)} ({by_peak} instances, not {by_average})",
        source="guide 1.3",
    )
    return PeakSizing(ratio, by_average, by_peak, short, (step,))


def poisson_peak(*, mean: float, quantile: float) -> int:
    """Arrivals in one interval that a steady Poisson process stays within, at the quantile.

    With the mean arrivals of the interval. It is what chance alone adds to a constant rate; a
    daily curve comes on top (guide 1.3 has 65 on average and 160 at P95, where chance gives 79).

    Raises:
        SizingError: the mean is not positive, or the quantile not between 0 and 1.
    """
    positive("mean", mean)
    within("quantile", quantile, low=1e-9, high=1 - 1e-9)
    if mean > _NORMAL_FROM:
        return math.ceil(NormalDist(mean, math.sqrt(mean)).inv_cdf(quantile))
    total, count = math.exp(-mean), 0
    while total < quantile and count < mean + 40 * math.sqrt(mean) + 40:
        count += 1
        total += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    return count


# --- Replicas and pool sizes from token rates: prefill, decode and their ratio. Pure. Guide 6.5 ---


_SOURCE = "guide 6.5; capacity planning text, first-pass estimate"


@dataclass(frozen=True, slots=True)
class TokenReplicas:
    """Replicas by tokens; the `_exact` figures are replica-seconds of work per second.

    `prefill` and `decode` count each phase alone, as two pools. `colocated` is for replicas that
    do both in turn: their work adds up. None where a phase's rate was not given.
    """

    prefill_exact: float | None
    decode_exact: float
    prefill: int | None
    decode: int
    colocated: int | None
    steps: tuple[Step, ...]


def _work(tokens_per_request: float, requests_per_s: float, rate: float) -> Fraction:
    return exact(requests_per_s) * exact(tokens_per_request) / exact(rate)


def _step(phase: str, tokens: str, values: str, work: Fraction) -> Step:
    return Step(
        title=f"Replicas for {phase}",
        formula=f"ceil(peak RPS x {tokens} / {phase} tokens/s of one replica)",
        values=f"ceil({values}) = ceil({figure(float(work))})",
        result=f"{math.ceil(work)}",
        source=_SOURCE,
    )


def token_replicas(
    *,
    peak_requests_per_s: float,
    output_tokens: float,
    decode_tokens_per_s: float,
    input_tokens: float | None = None,
    prefill_tokens_per_s: float | None = None,
    prefix_hit_ratio: float = 0.0,
) -> TokenReplicas:
    """Replicas that the peak's output tokens need, and its input tokens where both are given.

    Tokens are averages per request; rates are of one replica, measured in each phase alone.
    Of the input, the share `prefix_hit_ratio` is already cached and costs no prefill.
    A first estimate: it knows no queue, no length distribution and no target.

    Raises:
        SizingError: a number is not positive, or the hit ratio is not in 0..1 (1 excluded).
    Source: guide 6.5 (work of a phase); the fourth text's capacity planning (decode, rounded up).
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("output_tokens", output_tokens)
    positive("decode_tokens_per_s", decode_tokens_per_s)
    if not 0 <= prefix_hit_ratio < 1:
        raise SizingError(
            f"prefix_hit_ratio is {prefix_hit_ratio:g}; it must be 0 or more and below 1",
            name="prefix_hit_ratio",
        )
    decode = _work(output_tokens, peak_requests_per_s, decode_tokens_per_s)
    peak = figure(peak_requests_per_s)
    values = f"{peak} x {figure(output_tokens)} / {figure(decode_tokens_per_s)}"
    decode_step = _step("decode", "output tokens", values, decode)
    if input_tokens is None or prefill_tokens_per_s is None:
        return TokenReplicas(None, float(decode), None, math.ceil(decode), None, (decode_step,))
    positive("input_tokens", input_tokens)
    positive("prefill_tokens_per_s", prefill_tokens_per_s)
    prefill = _work(input_tokens, peak_requests_per_s, prefill_tokens_per_s)
    prefill *= 1 - exact(prefix_hit_ratio)
    share = figure(1 - prefix_hit_ratio)
    values = f"{peak} x {figure(input_tokens)} x {share} / {figure(prefill_tokens_per_s)}"
    prefill_step = _step("prefill", "input tokens x (1 - hit ratio)", values, prefill)
    return TokenReplicas(
        prefill_exact=float(prefill),
        decode_exact=float(decode),
        prefill=math.ceil(prefill),
        decode=math.ceil(decode),
        colocated=math.ceil(prefill + decode),
        steps=(prefill_step, decode_step),
    )


@dataclass(frozen=True, slots=True)
class PrefillDecodeRatio:
    """GPUs of the two pools of a disaggregated fleet; `ratio` is prefill over decode.

    `text` writes it as the guide does, `1:2.3`.
    """

    ratio: float
    prefill_gpus_exact: float
    decode_gpus_exact: float
    prefill_gpus: int
    decode_gpus: int
    text: str
    steps: tuple[Step, ...]


def prefill_decode_ratio(
    *,
    peak_requests_per_s: float,
    input_tokens: float,
    output_tokens: float,
    prefill_tokens_per_s_per_gpu: float,
    decode_tokens_per_s_per_gpu: float,
) -> PrefillDecodeRatio:
    """Prefill GPUs to decode GPUs for the workload; rates are of one GPU, each phase alone.

    The peak cancels in the ratio and counts only for the pools' sizes.

    Raises:
        SizingError: a number is not positive.
    Source: guide 6.5.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("input_tokens", input_tokens)
    positive("output_tokens", output_tokens)
    positive("prefill_tokens_per_s_per_gpu", prefill_tokens_per_s_per_gpu)
    positive("decode_tokens_per_s_per_gpu", decode_tokens_per_s_per_gpu)
    prefill = _work(input_tokens, peak_requests_per_s, prefill_tokens_per_s_per_gpu)
    decode = _work(output_tokens, peak_requests_per_s, decode_tokens_per_s_per_gpu)
    ratio, peak = float(prefill / decode), figure(peak_requests_per_s)
    text = f"{figure(ratio)}:1" if ratio >= 1 else f"1:{figure(1 / ratio)}"
    step = Step(
        title="P:D ratio",
        formula="(RPS x input / prefill tokens/s) / (RPS x output / decode tokens/s), per GPU",
        values=f"({peak} x {figure(input_tokens)} / {figure(prefill_tokens_per_s_per_gpu)}) / "
        f"({peak} x {figure(output_tokens)} / {figure(decode_tokens_per_s_per_gpu)})",
        result=text,
        source="guide 6.5",
    )
    return PrefillDecodeRatio(
        ratio=ratio,
        prefill_gpus_exact=float(prefill),
        decode_gpus_exact=float(decode),
        prefill_gpus=math.ceil(prefill),
        decode_gpus=math.ceil(decode),
        text=text,
        steps=(step,),
    )
