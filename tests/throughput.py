"""The roofline held against measured servers: `tests/fixtures/kvtruth/throughput.jsonl`.

136 points of vLLM on H100, H200 and A100 that their owners published, each with its source. Runs
that say how many requests were in flight are compared in the steady state; bursts, and closed loops
too short for a steady state, are played step by step from an idle server. What the rows do not say
and is taken here:
the `inference-sim` rows repeat some 20 to 50 prompts (their generator's published settings, such
as 9 system prompts x 5 users), so all but the last block of each is taken as cached:
`prefix_hit_ratio` 0.97. That is inferred, no log shows it. Output lengths of ShareGPT are spread
like an exponential. Four runs of GLM-4.5-Air that the source's H100 page repeats from its A100 page
to the last digit are taken as the A100's; the H100's own are in that page's summary table.

Usage: python -m tests.throughput
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.memory.launch import Launch, parse_version
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.speed.performance import Drafting, Load, performance, step_model
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    DEFAULT,
    Costs,
    Efficiency,
    costs,
    on_gpu,
)
from kneewatch.diagnose.sizing.speed.wave import Burst
from tests.peers import aiconfigurator_estimates

CATALOGUE = Path(__file__).parents[1] / "diagnose" / "catalogue" / "models.json"
POINTS = Path(__file__).parent / "fixtures" / "kvtruth" / "throughput.jsonl"
Figures = npt.NDArray[np.float64]
ASSUMED_ACCEPTANCE = 0.8
"""Of one MTP token; the source does not say (DeepSeek-V3's report has 0.85 to 0.9)."""


class Point(Struct, frozen=True, kw_only=True):
    """One published measurement; None where the source does not say."""

    source: str
    model: str
    workload: str
    tensor_parallel: int
    input_tokens: float
    output_tokens: float
    prompts: int
    output_tokens_per_s: float
    tpot_s: float
    ttft_s: float | None = None
    gpu: str = "h100-sxm"
    tpot_from_latency: bool = False
    pipeline_parallel: int = 1
    vllm_version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = False
    max_concurrency: float | None = None
    peak_concurrency: float | None = None
    mean_in_flight: float | None = None
    request_rate_per_s: float | None = None
    latency_s: float | None = None
    status: str | None = None
    doubt: str | None = None
    prefix_hit_ratio: float = 0.0

    @property
    def in_flight(self) -> float | None:
        """Requests in flight in the mean: as stated, or by Little's law; None for a burst.

        Where a latency is given, its product with the request rate is nearer the truth than
        `max_concurrency`, which such rows fill with the peak.
        """
        if self.mean_in_flight is not None:
            return self.mean_in_flight
        if self.max_concurrency is not None and self.latency_s is not None:
            return self.output_tokens_per_s / self.output_tokens * self.latency_s
        return self.max_concurrency

    @property
    def is_short_closed_loop(self) -> bool:
        """Whether the run is too short for a steady state: a tenth of it in flight, or more."""
        most = self.max_concurrency
        return most is not None and self.latency_s is not None and most > self.prompts / 5

    @property
    def regime(self) -> str:
        """What kind of load it was."""
        in_flight = self.in_flight
        if in_flight is None:
            return "burst, long prompts" if self.input_tokens >= 1000 else "burst, short prompts"
        if self.status is not None and self.status.startswith("overloaded"):
            return "overloaded"
        if in_flight <= 8:
            return "1 to 8 in flight"
        return "9 to 99 in flight" if in_flight < 100 else "100 and more in flight"

    @property
    def drafts(self) -> bool:
        """Whether it ran with one MTP token: only the pages' final runs and their own row did."""
        rated = "Other Benchmark Cases / Rate" in self.workload
        return rated or "Speculative Decoding" in self.workload


@cache
def points() -> tuple[Point, ...]:
    """The published measurements, in the file's order."""
    lines = POINTS.read_text("utf-8").splitlines()
    return tuple(Point(**json.loads(line)) for line in lines)


@cache
def catalogue_model(name: str) -> Model:
    """The catalogue's model."""
    return model(name)


def launch(point: Point) -> Launch:
    """The point's model, GPUs, split and version; 0.11, as most have, where it is not stated."""
    split = Parallel(point.tensor_parallel, point.pipeline_parallel)
    version = parse_version(point.vllm_version or "0.11.0")
    return Launch(catalogue_model(point.model), gpu(point.gpu), split, version=version)


@cache
def point_costs(point: Point) -> Costs:
    """What a step costs on the point's GPUs."""
    return costs(launch(point))


@cache
def max_running(point: Point) -> float:
    """Requests of the point's mean length that the KV cache and max_num_seqs hold.

    A rough budget, not the memory model under test elsewhere: 90 % of 79.18 GiB, the weights,
    9.75 x max_num_seqs x vocabulary x 4 bytes of activations, and what is not torch's.
    """
    described, cost = catalogue_model(point.model), point_costs(point)
    seqs = point.max_num_seqs or 1024
    parameters = described.parameters
    assert parameters is not None
    table_bytes = 2 * parameters.embedding / point.tensor_parallel if parameters.head else 0.0
    weights_bytes = cost.weights_bytes + cost.experts_bytes + table_bytes
    beside_gib = {1: 0.13, 2: 0.55, 4: 0.65, 8: 1.0}[point.tensor_parallel]
    budget_bytes = 0.9 * gpu(point.gpu).memory_bytes - weights_bytes / point.pipeline_parallel
    budget_bytes -= 9.75 * seqs * described.vocab_size * 4 + beside_gib * GIB
    length = point.input_tokens + point.output_tokens / 2
    kept_bytes = cost.kv_bytes_per_token * length + cost.state_bytes / 2
    for window in cost.windows:
        kept_bytes += window.kv_bytes_per_token * min(length, window.tokens)
    return max(1.0, min(seqs, budget_bytes * point.pipeline_parallel / kept_bytes))


def load(point: Point, in_flight: float) -> Load:
    """The point's load at its requests in flight."""
    drafting = None
    if point.drafts:
        # One layer and the output projection again.
        cost = point_costs(point)
        head_bytes = cost.head_flop_per_token
        share = 1 / cost.layers + head_bytes / cost.weights_bytes
        drafting = Drafting(tokens=1, acceptance_ratio=ASSUMED_ACCEPTANCE, cost_ratio=share)
    return Load(
        input_tokens=point.input_tokens,
        output_tokens=point.output_tokens,
        concurrency=in_flight,
        max_running=max_running(point),
        max_num_batched_tokens=point.max_num_batched_tokens or 8192,
        prefix_hit_ratio=point.prefix_hit_ratio,
        drafting=drafting,
    )


class Estimate(Struct, frozen=True):
    """What the roofline says of a point."""

    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float


@cache
def estimate(point: Point, efficiency: Efficiency = DEFAULT) -> Estimate:
    """The roofline's figures for a point."""
    in_flight = point.in_flight
    if in_flight is None or point.is_short_closed_loop:
        return played(point, efficiency)
    reached = on_gpu(gpu(point.gpu), efficiency)
    predicted = performance(point_costs(point), load(point, in_flight), reached)
    return Estimate(predicted.decode_tokens_per_s, predicted.ttft_s, predicted.itl_s)


def lengths(point: Point) -> list[float]:
    """Output lengths: as given for random prompts, spread like an exponential for ShareGPT."""
    if point.workload.startswith("random"):
        return [point.output_tokens] * point.prompts
    golden = (math.sqrt(5) - 1) / 2
    spread = [(index * golden) % 1 for index in range(1, point.prompts + 1)]
    return [max(1.0, round(-point.output_tokens * math.log(1 - share))) for share in spread]


def played(point: Point, efficiency: Efficiency) -> Estimate:
    """A burst's figures, played step by step."""
    efficiency = on_gpu(gpu(point.gpu), efficiency)
    step = step_model(
        point_costs(point),
        efficiency,
        context_tokens=point.input_tokens + point.output_tokens / 2,
        prompt_context_tokens=point.input_tokens / 2,
    )
    asked = lengths(point)
    burst = Burst(
        step=step,
        prompt_tokens=point.input_tokens,
        budget=(point.max_num_batched_tokens or 8192) * step.stages,
        places=max_running(point),
        lengths=asked,
        in_flight=point.max_concurrency or math.inf,
        request_s=efficiency.request_s + efficiency.prompt_token_s * point.input_tokens,
    )
    burst.play()
    return Estimate(
        sum(asked) / burst.clock_s, statistics.fmean(burst.firsts_s), statistics.fmean(burst.gaps_s)
    )


def off_ratio(estimated: float, measured: float) -> float:
    """Estimated over measured, less one."""
    return estimated / measured - 1


def trusted() -> list[Point]:
    """The points without a doubt about what was measured."""
    return [point for point in points() if point.doubt is None]


def steady(point: Point) -> bool:
    """Whether the point says its concurrency and was not overloaded."""
    return point.in_flight is not None and point.regime != "overloaded"


def errors(chosen: Sequence[Point], efficiency: Efficiency = DEFAULT) -> list[Estimate]:
    """Estimated over measured less one, of each figure, a point each."""
    estimates = [estimate(point, efficiency) for point in chosen]
    return [
        Estimate(
            off_ratio(estimated.output_tokens_per_s, point.output_tokens_per_s),
            math.nan if point.ttft_s is None else off_ratio(estimated.ttft_s, point.ttft_s),
            off_ratio(estimated.tpot_s, point.tpot_s),
        )
        for point, estimated in zip(chosen, estimates, strict=True)
    ]


def median_error_ratio(error_ratios: Sequence[float]) -> float:
    """Median of the errors' sizes."""
    return statistics.median(abs(error) for error in stated(error_ratios))


def stated(error_ratios: Sequence[float]) -> list[float]:
    """The errors of rows whose source states the figure."""
    return [error for error in error_ratios if not math.isnan(error)]


def family(point: Point) -> str:
    """The model without its organisation and format: GLM-4.6 and GLM-4.6-FP8 are one family."""
    return point.model.split("/")[-1].removesuffix("-FP8")


def family_median_errors(
    chosen: Sequence[Point], estimates: Sequence[Estimate] | None = None
) -> dict[str, float]:
    """The median error of output tokens/s of each family of models, signed."""
    estimates = errors(chosen) if estimates is None else estimates
    return {
        name: statistics.median(
            error.output_tokens_per_s
            for point, error in zip(chosen, estimates, strict=True)
            if family(point) == name
        )
        for name in sorted({family(point) for point in chosen})
    }


NUDGE = 0.95
PRIOR_ROWS = 1.0
"""What holds a constant where rows say little of it: its own value, with a weight of so many."""


MOST_ROWS = "Qwen3.5-9B"
"""The family with the most rows, and nearly the only one of its vLLM: what is left of the error of
the others shows whether the constants hold for a family that they were not fitted to."""


def left_out_errors(chosen: Sequence[Point]) -> list[Estimate]:
    """The errors of each point had the constants been fitted without its family of models.

    To first order: the logarithms of the figures as a linear function of those of the constants,
    least squares over all rows and over those of the other families. What the two fits differ by
    moves the point's figures.
    """
    kept = [name for name in DEFAULT.__struct_fields__ if not name.endswith("_factor")]
    names = [name for name in kept if name != "stated"]
    base = _logs(chosen, DEFAULT)
    slopes = np.stack(
        [
            (_logs(chosen, replace(DEFAULT, **{name: NUDGE * getattr(DEFAULT, name)})) - base)
            / math.log(NUDGE)
            for name in names
        ],
        axis=-1,
    )
    measured = ~np.isnan(base)
    whole = _fit(slopes[measured], base[measured])
    families = np.array([family(point) for point in chosen])
    moved = base.copy()
    for name in set(families):
        own = families == name
        others = measured & ~own[:, None]
        moved[own] += slopes[own] @ (_fit(slopes[others], base[others]) - whole)
    return [Estimate(*(float(each) for each in row)) for row in np.expm1(moved)]


def _logs(chosen: Sequence[Point], efficiency: Efficiency) -> Figures:
    """Logarithms of estimated over measured. Shape: (points, 3); NaN where not stated."""
    return np.log1p([astuple(error) for error in errors(chosen, efficiency)])


def _fit(slopes: Figures, logs: Figures) -> Figures:
    """The constants' logarithms that leave least of the errors. Shape: (constants,)."""
    held = slopes.T @ slopes + PRIOR_ROWS * np.eye(slopes.shape[1])
    return np.asarray(np.linalg.solve(held, -slopes.T @ logs), dtype=np.float64)


def measured_band(error_ratios: Sequence[float]) -> tuple[float, float]:
    """Bounds of measured over predicted that hold nine of ten rows, as many left out on each side.

    `found` are errors: predicted over measured, less one.
    """
    ratios = sorted(1 / (1 + error) for error in error_ratios)
    aside = len(ratios) // 20
    return ratios[aside], ratios[-1 - aside]


def _columns(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Errors of output tokens/s, TPOT and TTFT."""
    return [
        stated([error.output_tokens_per_s for error in estimates]),
        stated([error.tpot_s for error in estimates]),
        stated([error.ttft_s for error in estimates]),
    ]


def _line(title: str, estimates: Sequence[Estimate]) -> str:
    shown = [
        f"{median_error_ratio(column):>7.0%} {statistics.median(column):>+6.0%} "
        f"{max(column, key=abs):>+7.0%}"
        if column
        else f"{'-':>22}"
        for column in _columns(estimates)
    ]
    return f"{title:48}{len(estimates):>4} {'  '.join(shown)}"


def _grouped(
    chosen: Sequence[Point],
    key: Callable[[Point], str],
    estimates: Sequence[Estimate] | None = None,
) -> list[str]:
    estimates = errors(chosen) if estimates is None else estimates
    names = [key(point) for point in chosen]
    return [
        _line(name, [error for own, error in zip(names, estimates, strict=True) if own == name])
        for name in sorted(set(names))
    ]


def _only(
    chosen: Sequence[Point], estimates: Sequence[Estimate], holds: Callable[[Point], bool]
) -> list[Estimate]:
    return [error for point, error in zip(chosen, estimates, strict=True) if holds(point)]


def report() -> str:
    """The error by model, by regime and overall: median size, median, worst."""
    chosen = trusted()
    estimates = errors(chosen)
    head = "  ".join(f"{name:>7} median   worst" for name in ("tokens/s", "TPOT", "TTFT"))
    names = ("output tokens/s", "TPOT", "TTFT")
    left_out = left_out_errors(chosen)
    return "\n".join(
        [
            f"{'estimated over measured, less one':48}   n {head}",
            *_grouped(chosen, lambda point: point.regime),
            "",
            *_grouped(chosen, lambda point: f"{family(point)}, {point.gpu}, {_kind(point)}"),
            "",
            _line("all that state their concurrency", errors([p for p in chosen if steady(p)])),
            _line("all bursts", errors([p for p in chosen if p.in_flight is None])),
            _line("all", estimates),
            "",
            "each family by constants fitted without it:",
            *_grouped(chosen, lambda point: point.regime, left_out),
            _line("all", left_out),
            _line("all that state their concurrency", _only(chosen, left_out, steady)),
            _line(
                f"those but {MOST_ROWS}'s",
                _only(chosen, left_out, lambda p: steady(p) and family(p) != MOST_ROWS),
            ),
            "",
            *(
                f"nine of ten rows measured {low:.2f} to {high:.2f} times the predicted {name}"
                for name, (low, high) in zip(
                    names, map(measured_band, _columns(estimates)), strict=True
                )
            ),
            f"families beyond 40% of output tokens/s: {_far(chosen, estimates)}; by constants "
            f"fitted without them: {_far(chosen, left_out)}",
            "",
            "left out:",
            *(f"  {point.source}: {point.doubt}" for point in points() if point.doubt),
        ]
    )


def _far(chosen: Sequence[Point], estimates: Sequence[Estimate]) -> str:
    medians = family_median_errors(chosen, estimates).items()
    return (
        ", ".join(f"{name} {error:+.0%}" for name, error in medians if abs(error) > 0.4) or "none"
    )


SYSTEMS = {"h100-sxm": "h100_sxm", "h200": "h200_sxm", "a100-80gb": "a100_sxm"}
"""AIConfigurator's names of the points' GPUs."""


def beside_aiconfigurator() -> str:
    """Its errors beside ours, over the runs in a steady state that it can estimate.

    It is given the requests in flight as its batch.
    """
    chosen = [point for point in trusted() if steady(point) and not point.drafts]
    peer_estimates = aiconfigurator_estimates([_asked(point) for point in chosen])
    both = [
        (point, peer)
        for point, peer in zip(chosen, peer_estimates, strict=False)
        if peer is not None
    ]
    if not both:
        return "aiconfigurator: not installed, or it can estimate none of the models"
    ours = errors([point for point, _ in both])
    theirs = [
        Estimate(
            off_ratio(tokens_per_s, point.output_tokens_per_s),
            math.nan if point.ttft_s is None else off_ratio(ttft_s, point.ttft_s),
            off_ratio(tpot_s, point.tpot_s),
        )
        for point, (tokens_per_s, tpot_s, ttft_s) in both
    ]
    rows = [
        f"  {point.model}, {point.gpu} x {point.tensor_parallel}, {point.in_flight:.0f} in flight: "
        + "; ".join(
            f"{name} {own.output_tokens_per_s:+.0%} tokens/s, {own.tpot_s:+.0%} TPOT, "
            f"{own.ttft_s:+.0%} TTFT"
            for name, own in (("kneewatch", mine), ("aiconfigurator", other))
        )
        for (point, _), mine, other in zip(both, ours, theirs, strict=True)
    ]
    return "\n".join(
        [
            "the runs in a steady state whose model aiconfigurator can estimate",
            *rows,
            _line("kneewatch", ours),
            _line("aiconfigurator", theirs),
            "rows in which kneewatch is nearer: " + _nearer(ours, theirs),
        ]
    )


def _nearer(ours: Sequence[Estimate], theirs: Sequence[Estimate]) -> str:
    pairs = [
        [abs(own) < abs(other) for own, other in zip(*each, strict=True)]
        for each in zip(_columns(ours), _columns(theirs), strict=True)
    ]
    names = ("output tokens/s", "TPOT", "TTFT")
    return ", ".join(
        f"{name} {sum(nearer)} of {len(nearer)}" for name, nearer in zip(names, pairs, strict=True)
    )


def _asked(point: Point) -> dict[str, object]:
    mixture = bool(catalogue_model(point.model).experts.count)
    return {
        "config": configuration(point.model),
        "model_path": point.model,
        "system_name": SYSTEMS[point.gpu],
        "isl": round(point.input_tokens),
        "osl": max(2, round(point.output_tokens)),
        "batch_size": max(1, round(point.in_flight or 1)),
        "tp_size": point.tensor_parallel,
        "prefix": int(point.input_tokens * point.prefix_hit_ratio),
        "ctx_tokens": point.max_num_batched_tokens or 8192,
        **({"moe_tp_size": point.tensor_parallel, "moe_ep_size": 1} if mixture else {}),
    }


def configuration(name: str) -> dict[str, object]:
    """The catalogue's fields of a model as the file that its publisher has."""
    entries = json.loads(CATALOGUE.read_text("utf-8"))
    entry = entries[catalogue_model(name).id]
    entry = {**entries.get(entry.get("base"), {}), **entry}
    fields: dict[str, object] = {"hidden_act": "silu", **entry["config"]}
    outer = {"architectures": [entry.get("architecture") or "LlamaForCausalLM"]}
    interval = fields.get("full_attention_interval")
    if not isinstance(interval, int):
        return {**outer, **fields}
    layers = range(1, catalogue_model(name).depth + 1)
    kinds = ["linear_attention" if layer % interval else "full_attention" for layer in layers]
    text = {**fields, "layer_types": kinds, "layer_types_count": None}
    return {**outer, "model_type": fields["model_type"], "text_config": text}


def _kind(point: Point) -> str:
    if point.in_flight is None:
        return "bursts"
    return "steady" if steady(point) else "overloaded"


if __name__ == "__main__":
    print(f"{report()}\n\n{beside_aiconfigurator()}")
