"""Whether a benchmark is of the launch to size, and the MBU and MFU that it reached. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kneewatch.diagnose.capacity import BenchmarkPoint, alike
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark, refuse
from kneewatch.diagnose.sizing.speed.performance import ClosedLoop, Load, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import Costs, decode_bytes
from kneewatch.rules.formatting import figure


def matched(
    benchmark: Benchmark,
    sized: Model,
    *,
    input_tokens: float | None = None,
    output_tokens: float | None = None,
) -> Benchmark:
    """The benchmark, with notes where it may be of another model, or of requests of other lengths.

    Raises:
        SizingError: it is of another model of the catalogue.
    """
    notes = [*_other_models(benchmark, sized)]
    for side, wanted, measured in (
        ("prompts", input_tokens, [point.input_tokens for point in benchmark.points]),
        ("answers", output_tokens, [_answer_tokens(point) for point in benchmark.points]),
    ):
        far = next((tokens for tokens in measured if not alike(tokens, wanted)), None)
        if far is not None and wanted is not None:
            notes.append(
                f"the benchmark's {side} have {figure(round(far))} tokens, those to size for "
                f"{figure(wanted)}: its rates are of other work"
            )
    return replace(benchmark, notes=(*benchmark.notes, *dict.fromkeys(notes)))


def _answer_tokens(point: BenchmarkPoint) -> float | None:
    tokens_per_s = point.output_tokens_per_s
    return None if tokens_per_s is None else tokens_per_s / point.requests_per_s


def _other_models(benchmark: Benchmark, sized: Model) -> Iterator[str]:
    for name in dict.fromkeys(point.model for point in benchmark.points if point.model):
        if name.rpartition("/")[2].lower() == sized.id.rpartition("/")[2].lower():
            continue
        try:
            named = model(name)
        except SizingError:
            yield f"the benchmark's model is {name!r}: check that it is {sized.id}"
            continue
        if (named.layers, named.hidden_size) != (sized.layers, sized.hidden_size):
            raise refuse(f"the benchmark is of {name}, not of {sized.id}")


SHARES = ("mbu_ratio", "mfu_ratio", "predicted_mbu_ratio", "predicted_mfu_ratio")


def achieved(point: BenchmarkPoint, loop: ClosedLoop, *, engines: int = 1) -> dict[str, float]:
    """What a measured point reached on each GPU over a whole run, and what was predicted for the
    same requests: shares of its bandwidth, by what the decode steps read, and of its FLOP/s, by the
    products with weights. Requests have the loop's lengths unless the point states its own.

    Source: text 001, 4.3 and 4.8, with the bytes that a batch shares.
    """
    in_flight = max(point.concurrency / engines, 1.0)
    load = loop.load
    own = replace(
        load,
        concurrency=in_flight,
        input_tokens=point.input_tokens or load.input_tokens,
        output_tokens=_answer_tokens(point) or load.output_tokens,
    )
    predicted = performance(loop.costs, own, loop.efficiency)
    rates = (point.requests_per_s / engines, predicted.requests_per_s)
    shares = [share for rate in rates for share in _shares(loop.costs, own, rate)]
    return dict(zip(SHARES, shares, strict=True))


def _shares(costs: Costs, load: Load, requests_per_s: float) -> tuple[float, float]:
    """MBU of the decode steps and MFU of all tokens, at a rate of one engine."""
    context = load.input_tokens + load.output_tokens / 2
    running = min(load.concurrency, load.max_running)
    weights_bytes, sequence_bytes = decode_bytes(costs, context_tokens=context, sequences=running)
    answers_per_s = requests_per_s * load.output_tokens
    read_per_s = answers_per_s * (weights_bytes / running + sequence_bytes)
    tokens_per_s = answers_per_s + requests_per_s * load.input_tokens
    flop_per_s = (
        tokens_per_s * costs.body_flop_per_token + answers_per_s * costs.head_flop_per_token
    )
    stages = costs.pipeline_parallel
    return (
        read_per_s / costs.bandwidth_bytes_per_s / stages,
        flop_per_s / costs.flop_per_s / stages,
    )
