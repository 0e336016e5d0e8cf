"""The answer to a sizing question as text, and as the JSON document kneewatch.size/1. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil, floor
from typing import Any

from msgspec.structs import asdict, replace

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS
from kneewatch.diagnose.capacity import BenchmarkPoint, Range
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Step, gibibytes, seconds
from kneewatch.diagnose.sizing.benchmark.operating_point import OperatingPoint
from kneewatch.diagnose.sizing.launch_command import shown_flags, sized_command
from kneewatch.diagnose.sizing.levers import Lever, holds_few, lever_document, lever_text, levers
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.memory_arithmetic import draft_token_bytes, memory_steps
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.serving_cost import Scaled, Scaling
from kneewatch.diagnose.sizing.size import Size, size, start_failure
from kneewatch.diagnose.sizing.speed.roofline_inputs import margins
from kneewatch.diagnose.sizing.speed.wave import Wave
from kneewatch.reports.lines import WIDTH, wrapped
from kneewatch.rules.formatting import duration, figure, number, percent, plural, rate

SCHEMA = "kneewatch.size/1"


def size_document(answer: Size) -> dict[str, Any]:
    """The JSON document of an answer. Unknown values are null, and `notes` contain the reasons."""
    fewest = answer.fewest
    return {
        "schema": SCHEMA,
        "fits": answer.fits,
        "meets_targets": answer.meets_targets,
        "serves_peak": answer.serves_peak,
        "inputs": _inputs(answer.question, answer),
        "memory": _memory(answer),
        "min_gpus": fewest.expected if fewest else None,
        "min_gpus_range": {end: getattr(fewest, end, None) for end in ("low", "expected", "high")},
        "performance": _performance(answer),
        "levers": [lever_document(lever) for lever in levers(answer)],
        "fleet": _fleet(answer),
        "cost": _cost(answer),
        "command": sized_command(answer.memory.launch) if answer.fits else None,
        "steps": [asdict(step) for step in (*memory_steps(answer.memory), *answer.sheet.steps)],
        "notes": [*answer.doubts, *answer.notes, *answer.missed],
    }


def nothing_document(extra: Mapping[str, Any], *, fits: bool = False) -> dict[str, Any]:
    """The JSON document of `size` if the answer is not a single launch, but a plan, or a search
    without a result. The keys about a launch are null or empty unless `extra` contains them."""
    empty: dict[str, Any] = {
        "schema": SCHEMA,
        "fits": fits,
        **dict.fromkeys(("meets_targets", "serves_peak", "inputs", "memory", "min_gpus")),
        "min_gpus_range": None,
        **dict.fromkeys(("performance", "fleet", "cost", "command")),
        "levers": [],
        "steps": [],
        "notes": [],
    }
    return empty | dict(extra)


def _inputs(question: Question, answer: Size) -> dict[str, Any]:
    launch = question.launch
    return {
        "engine": launch.kind.title,
        "model": launch.model.id,
        "model_source": launch.model.source,
        "gpu": launch.gpu.id if launch.gpu else None,
        "gpu_source": launch.gpu.source if launch.gpu else None,
        "replicas": question.replicas,
        "tensor_parallel": launch.parallel.tensor,
        "pipeline_parallel": launch.parallel.pipeline,
        "decode_context_parallel": launch.decode_context_parallel,
        "data_parallel": launch.parallel.data,
        "expert_parallel": launch.parallel.experts,
        "quantization": launch.scheme.id,
        "kv_cache_dtype": launch.kv_cache_dtype,
        "gpu_memory_utilization": launch.utilization,
        "max_model_len": launch.longest_tokens,
        "max_num_seqs": launch.seqs,
        "max_num_batched_tokens": launch.batched_tokens,
        "vllm_version": ".".join(str(part) for part in launch.version),
        "overhead": launch.overhead,
        "context_tokens": launch.context,
        "concurrency": question.concurrency_per_engine * question.engines,
        "input_tokens": question.input_tokens,
        "output_tokens": question.output_tokens,
        "peak_requests_per_s": question.peak_requests_per_s,
        "usable_requests_per_s": answer.usable_requests_per_s,
        "usable_requests_source": answer.usable_source,
        "ttft_slo_s": question.targets.ttft_p99_s,
        "itl_slo_s": question.targets.itl_p99_s,
        "flags": shown_flags(launch),
        "safety": question.safety,
        "usd_per_gpu_hour": question.price_usd_per_gpu_hour,
        "utilization_ratio": question.full_load_ratio,
        "max_loras": launch.adapters.slots if launch.adapters else None,
        "max_lora_rank": launch.adapters.rank if launch.adapters else None,
        "draft_model": launch.draft.model.id if launch.draft else None,
        "num_speculative_tokens": launch.draft.tokens if launch.draft else None,
        "acceptance_ratio": question.acceptance_ratio,
        "mfu_ratio": question.efficiency.mfu_ratio,
        "mbu_ratio": question.efficiency.mbu_ratio,
    }


def _memory(answer: Size) -> dict[str, Any]:
    memory = answer.memory
    weights, overhead = memory.weights_bytes, memory.overhead
    return {
        "weights_bytes_per_gpu": None if weights is None else round(weights),
        "kv_bytes_per_token_per_gpu": _number(memory.layout.token_bytes),
        "kv_bytes_per_request_per_gpu": round(memory.layout.request_bytes(memory.launch.context)),
        "overhead_bytes_per_gpu": None if overhead is None else round(overhead.expected_bytes),
        "kv_available_bytes_per_gpu": _whole(memory.available_bytes),
        "kv_blocks": _whole(memory.available_bytes.map(memory.layout.blocks)),
        "kv_capacity_tokens": _whole(memory.logged_tokens),
        "kv_tokens_at_context": _whole(memory.held_tokens),
        "max_concurrency": asdict(memory.concurrency.map(lambda requests: round(requests, 3))),
        "held_requests": asdict(memory.held.map(lambda requests: round(requests, 3))),
        "fits": answer.fits,
        "adapter_bytes_per_gpu": round(memory.adapter_bytes),
        "draft_bytes_per_gpu": round(memory.draft_bytes),
        "draft_kv_bytes_per_token_per_gpu": _number(draft_token_bytes(memory)),
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _whole(amount: Range) -> dict[str, int]:
    return asdict(amount.map(floor))


_MANY_ROUNDS = 10
"""Requests one after another of each client in a long benchmark."""


def _performance(answer: Size) -> dict[str, Any]:
    """The performance of one replica: the sum over its data-parallel engines."""
    performance, engines = answer.performance, answer.question.launch.parallel.data
    if performance is None:
        return dict.fromkeys(
            ("prefill_tokens_per_s", "decode_tokens_per_s", "requests_per_s", "ttft_s", "itl_s",
             "ttft_peak_s", "itl_peak_s", "running_peak", *_wave("wave", None, engines),
             *_wave("rounds", None, engines), "running", "binding",
             "ridge_flop_per_byte", "decode_flop_per_byte", "batch_at_ridge")
        )  # fmt: skip
    bound, at_peak = performance.intensity, answer.at_peak()
    batch = bound.batch_at_ridge
    return {
        "prefill_tokens_per_s": round(performance.prefill_tokens_per_s * engines, 1),
        "decode_tokens_per_s": round(performance.decode_tokens_per_s * engines, 1),
        "requests_per_s": round(performance.requests_per_s * engines, 4),
        "ttft_s": round(performance.ttft_s, 5),
        "itl_s": round(performance.itl_s, 6),
        "ttft_peak_s": None if at_peak is None else round(at_peak[1].ttft_s, 5),
        "itl_peak_s": None if at_peak is None else round(at_peak[1].itl_s, 6),
        "running_peak": None if at_peak is None else round(at_peak[0] * engines, 2),
        **_wave("wave", answer.in_waves(), engines),
        **_wave("rounds", answer.in_waves(_MANY_ROUNDS), engines),
        "running": round(performance.running * engines, 2),
        "binding": performance.binding,
        "ridge_flop_per_byte": round(bound.ridge_flop_per_byte, 2),
        "decode_flop_per_byte": round(bound.decode_flop_per_byte, 3),
        "batch_at_ridge": None if batch is None else round(batch, 1),
    }


def _wave(name: str, waves: Wave | None, engines: int) -> dict[str, float | None]:
    keys = f"ttft_{name}_s", f"itl_{name}_s", f"output_tokens_{name}_per_s"
    if waves is None:
        return dict.fromkeys(keys)
    figures = waves.ttft_s, waves.itl_s, waves.output_tokens_per_s * engines
    return dict(zip(keys, map(round, figures, (5, 6, 1)), strict=True))


def _fleet(answer: Size) -> dict[str, Any]:
    names, fleet = ("instances", "deployed_instances", "gpus", "headroom_ratio"), answer.fleet
    return {name: None if fleet is None else round(getattr(fleet, name), 4) for name in names}


def _cost(answer: Size) -> dict[str, Any]:
    per_token, per_year = answer.usd_per_million_output_tokens, answer.usd_per_year
    return {
        "gpus": answer.gpus,
        "usd_per_million_output_tokens": (None if per_token is None else round(per_token, 4)),
        "usd_per_year": None if per_year is None else round(per_year, 2),
        "utilization_ratio": round(answer.utilization_ratio, 4),
        "utilization_source": answer.utilization_source,
    }


# --- A sizing answer and its benchmark as text for people -----------------------------------------


def operating_point_document(operating_point: OperatingPoint) -> dict[str, Any]:
    """C_max, the knee and the warnings about the benchmark as JSON."""
    return {
        "c_max": _point(operating_point.c_max),
        "is_lower_bound": operating_point.is_lower_bound,
        "first_miss": _point(operating_point.first_miss),
        "missed": list(operating_point.missed),
        "knee": {"safe": _point(operating_point.knee.safe), "basis": operating_point.knee.basis},
        "peak_requests_per_s": operating_point.peak_requests_per_s,
        "flags": [{"kind": flag.kind, "message": flag.message} for flag in operating_point.flags],
        "steps": [step.line() for step in operating_point.steps],
    }


def _point(point: BenchmarkPoint | None) -> dict[str, Any] | None:
    names = ("concurrency", "requests_per_s", "ttft_p99_s", "itl_p99_s")
    return None if point is None else {name: getattr(point, name) for name in names}


def operating_point_lines(operating_point: OperatingPoint) -> list[str]:
    """Lines of text with C_max, the knee and the warnings about the benchmark."""
    best = operating_point.c_max
    if best is None:
        first = "Benchmark: no measured concurrency meets the targets"
    else:
        bound = " or more" if operating_point.is_lower_bound else ""
        first = (
            f"Benchmark: C_max {figure(best.concurrency)}{bound} in flight, "
            f"{figure(best.requests_per_s)} requests/s usable, "
            f"TTFT P99 {seconds(best.ttft_p99_s)}, ITL P99 {seconds(best.itl_p99_s)}"
        )
    lines = [first, *[f"  limit: {missed}" for missed in operating_point.missed]]
    knee = operating_point.knee
    lines.append(
        f"  knee after {figure(knee.safe.concurrency)} in flight ({knee.basis}): keep the P95 of "
        f"arrivals at or below {figure(knee.safe.requests_per_s)} requests/s per replica"
    )
    return [*lines, *[f"  warning: {flag.message}" for flag in operating_point.flags]]


def achieved_lines(reached: Mapping[str, float]) -> list[str]:
    """The MBU and MFU of the benchmark at C_max beside the predicted ones."""
    mbu, mfu, predicted_mbu, predicted_mfu = map(percent, reached.values())
    return [
        f"  at C_max it reached MBU {mbu} and MFU {mfu}; predicted: {predicted_mbu} and "
        f"{predicted_mfu}"
    ]


# --- Tensor-parallel degrees ----------------------------------------------------------------------


HEAD = (
    "TP",
    "in flight",
    "{unit}/s",
    "{unit}/s per GPU",
    "scaling",
    "USD/M tokens",
    "TTFT P99",
    "ITL P99",
)


def scaling_document(scaling: Scaling) -> dict[str, Any]:
    """A benchmark of several tensor-parallel degrees as JSON: all measured degrees, the cheapest
    one that meets the targets, and notes."""
    return {
        "degrees": [_row(row) for row in scaling.rows],
        "cheapest_tensor_parallel": scaling.cheapest,
        "notes": list(scaling.notes),
    }


def _row(row: Scaled) -> dict[str, Any]:
    degree = row.degree
    point, gpus = degree.point, degree.tensor_parallel
    tokens = None if point is None else point.output_tokens_per_s
    return {
        "tensor_parallel": gpus,
        "concurrency": None if point is None else point.concurrency,
        "output_tokens_per_s": tokens,
        "output_tokens_per_s_per_gpu": None if tokens is None else round(tokens / gpus, 4),
        "requests_per_s": None if point is None else point.requests_per_s,
        "requests_per_s_per_gpu": None if point is None else round(point.requests_per_s / gpus, 6),
        "ttft_p99_s": None if point is None else point.ttft_p99_s,
        "itl_p99_s": None if point is None else point.itl_p99_s,
        "scaling_efficiency_ratio": _rounded(row.efficiency_ratio),
        "usd_per_million_output_tokens": _rounded(row.usd_per_million_tokens),
        "is_lower_bound": not degree.reached,
        "missed": degree.missed,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def scaling_lines(scaling: Scaling) -> list[str]:
    """The measured tensor-parallel degrees as a text table."""
    rows = [
        [name.format(unit=scaling.unit) for name in HEAD],
        *[_cells(row) for row in scaling.rows],
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = [
        "Benchmark by tensor-parallel degree: each at C_max, or at its highest throughput "
        "without targets"
    ]
    lines += [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines += [
        f"  TP {row.degree.tensor_parallel}: {row.degree.missed}"
        for row in scaling.rows
        if row.degree.missed
    ]
    if scaling.cheapest is not None:
        lines.append(f"  cheapest: TP {scaling.cheapest}, the highest throughput per GPU")
    return [*lines, *[f"  note: {note}" for note in scaling.notes]]


def _cells(row: Scaled) -> list[str]:
    degree, cost = row.degree, row.usd_per_million_tokens
    if degree.point is None or row.efficiency_ratio is None:
        return [str(degree.tensor_parallel), *["-"] * (len(HEAD) - 1)]
    more = "" if degree.reached else "+"
    return [
        str(degree.tensor_parallel),
        f"{figure(degree.point.concurrency)}{more}",
        f"{figure(round(degree.per_s, 3))}{more}",
        f"{figure(round(degree.per_s_per_gpu, 3))}{more}",
        f"{percent(row.efficiency_ratio)}",
        number(cost),
        seconds(degree.point.ttft_p99_s),
        seconds(degree.point.itl_p99_s),
    ]


# --- Sizing answer --------------------------------------------------------------------------------


BAR = 50
BRIEF_LINES = 11
"""The command and ten others."""


def size_text(
    answer: Size,
    *,
    first: Sequence[str] = (),
    extra: Sequence[str] = (),
    compared: Sequence[Lever] = (),
    levered: bool = True,
    width: int = WIDTH,
    whole: bool = True,
) -> list[str]:
    """Lines of text: the verdict, GPUs, cost and speed, missed targets, notes, then the memory bar
    and the arithmetic.

    `first` follows the verdict; `extra`, of a search or benchmark, precedes the arithmetic.
    `levered`: with the changes that hold more, where few requests fit. Without `whole` the
    arithmetic is left out, and the notes that do not fit in ten lines.
    """
    command, body = _body(answer, first, compared, levered=levered)
    lines = wrapped(_verdict(answer), width=width, more=2)
    for doubt in answer.doubts:
        lines += wrapped(f"warning: {doubt}", width=width, more=2)
    lines += command
    for line in (*body, _launch_line(answer)):
        lines += wrapped(line, width=width, more=2)
    left_out = 0
    for note in _notes(answer):
        noted = wrapped(f"note: {note}", width=width, more=6)
        if whole or note in answer.missed or len(lines) + len(noted) < BRIEF_LINES:
            lines += noted
        else:
            left_out += 1
    if not whole:
        more = f"{plural(left_out, 'more note')} and " if left_out else ""
        lines.append(f"{more}the arithmetic: --explain")
    if extra:
        lines.append("")
    for line in extra:
        lines += wrapped(line, width=width, more=5)
    if not whole:
        return lines
    lines += ["", *_picture(answer.memory, width=width), ""]
    for step in (*memory_steps(answer.memory), *answer.sheet.steps):
        lines += _step(step, width=width)
    return lines


def _price(answer: Size) -> list[str]:
    """The number of GPUs and their cost. Empty if no price is known."""
    per_year, per_token = answer.usd_per_year, answer.usd_per_million_output_tokens
    fleet = answer.fleet
    if per_year is None:
        return []
    replicas = answer.replicas
    purpose = "" if fleet is None else " for the peak"
    parts = [
        f"{plural(replicas, 'replica')}, {plural(answer.gpus, 'GPU')}{purpose}: "
        f"{figure(round(per_year))} USD a year"
    ]
    if per_token is not None:
        parts.append(
            f"{number(per_token)} USD per million output tokens at "
            f"{percent(answer.utilization_ratio)} utilization ({answer.utilization_source})"
        )
    if fleet is not None:
        parts.append(f"the peak can grow by {percent(fleet.headroom_ratio)}")
    return [", ".join(parts)]


def _verdict(answer: Size) -> str:
    memory, question = answer.memory, answer.question
    engines, held = question.engines, memory.held
    concurrency, seats = question.concurrency_per_engine * engines, memory.launch.seqs * engines
    low, expected, high = (floor(each) * engines for each in (held.low, held.expected, held.high))
    between = f" ({low:,} to {high:,})" if low < high else ""
    holds = f"holds {plural(expected, 'request')} of {memory.launch.context:,} tokens{between}"
    if engines > 1:
        holds += f" on {engines} engines together"
    if answer.fleet is not None and answer.fleet.deployed_instances > question.replicas == 1:
        holds = f"each replica {holds}"
    missed = ""
    if answer.meets_targets is False:
        missed = f"{'MISSES' if answer.is_above_targets else 'MAY MISS'} THE TARGETS: "
        missed += "; ".join(answer.missed)
    elif answer.serves_peak is False:
        missed = "DOES NOT SERVE THE RATE"
    if answer.fits:
        sure = held.low >= question.concurrency_per_engine
        queued, waits = concurrency - seats, ""
        if queued > 0:
            waits = f"; runs {seats:,} at once (max_num_seqs): {figure(queued)} of "
            waits += f"{figure(concurrency)} wait"
        fits = "FITS" if sure else "PROBABLY FITS"
        verdict = f"{fits} IN MEMORY, {missed}; {holds}" if missed else f"{fits}: {holds}"
        return f"{_for_load(answer)}{verdict}{waits}"
    failure = start_failure(memory, answer.fewest)
    failure = failure or f"{holds}, {figure(concurrency)} requested"
    return f"DOES NOT FIT: {failure}{missed and f'; {missed}'}"


def _for_load(answer: Size) -> str:
    """The stated users or rate with the GPUs that serve it; empty without either."""
    question, replicas = answer.question, answer.question.replicas
    load, peak_per_s = "", question.peak_requests_per_s
    if question.users is not None:
        load = plural(question.users, "user")
    elif answer.fleet is not None and peak_per_s is not None:
        load, replicas = f"{figure(peak_per_s)} requests/s", answer.fleet.deployed_instances
    if not load or not answer.succeeds:
        return load and f"{load}: "
    spread = question.launch.parallel.gpus
    return (
        f"{load}: {plural(replicas * spread, 'GPU')} ({plural(replicas, 'replica')} of {spread}). "
    )


def _run(answer: Size, better: Sequence[Lever]) -> list[str]:
    """The command of the launch, or of the best change if that fits and the launch does not."""
    if answer.fits:
        return [f"run: {sized_command(answer.memory.launch)}"]
    best = next(iter(better), None)
    if best is None or best.lacks:
        return []
    engines = f"{best.question.replicas} replicas of " if best.question.replicas > 1 else ""
    return [f"instead ({best.change}): {engines}{sized_command(best.memory.launch)}"]


_SHOWN_LEVERS = 5


def _listed(answer: Size, head: str, shown: Sequence[Lever]) -> list[str]:
    """Launches beside the answer's, a line each; `head` is the line above them."""
    context = answer.memory.launch.context
    lines = [f"  {lever_text(lever, context)}" for lever in shown]
    return [head.format(f"{context:,}"), *lines] if shown else []


def _notes(answer: Size) -> list[str]:
    """Missed targets, and notes. Notes that repeat the verdict are left out."""
    failure = start_failure(answer.memory, answer.fewest)
    in_verdict = {failure}
    if answer.meets_targets is False:
        in_verdict |= set(answer.missed)
    return [note for note in (*answer.missed, *answer.notes) if note not in in_verdict]


def _launch_line(answer: Size) -> str:
    launch = answer.memory.launch
    gpu = launch.gpu.name if launch.gpu else "GPU not set"
    version = ".".join(str(part) for part in launch.version)
    version = launch.slack.version if launch.slack is not None else version
    spread = launch.parallel
    engines = f", {spread.data} data-parallel engines" if spread.data > 1 else ""
    ranks = f", DCP {launch.decode_context_parallel}" if launch.decode_context_parallel > 1 else ""
    replicas = answer.question.replicas
    per_replica = f"{replicas} replicas, each " if replicas > 1 else ""
    return (
        f"{launch.model.id} ({launch.scheme.id} weights, "
        f"{launch.kv_format.label} KV cache) on {per_replica}"
        f"{spread.gpus} x {gpu} (TP {spread.tensor}, PP {spread.pipeline}{ranks}{engines}), "
        f"{launch.kind.title} {version}, utilization {figure(launch.utilization)}{_beside(launch)}"
    )


def _beside(launch: Launch) -> str:
    """A text on the adapters and the draft model that are loaded in addition to the model."""
    words = ""
    if launch.adapters is not None:
        words += f", {launch.adapters.slots} adapter slots of rank {launch.adapters.rank}"
    if launch.draft is not None:
        words += f", {launch.draft.tokens} tokens drafted by {launch.draft.model.id}"
    return words


def _picture(memory: Memory, *, width: int) -> list[str]:
    """The memory of one GPU, as a bar and as a list of parts."""
    launch = memory.launch
    if launch.gpu is None or memory.overhead is None or memory.weights_bytes is None:
        return [f"available KV cache on each GPU: {gibibytes(memory.available_bytes.expected)}"]
    whole_bytes = float(launch.gpu.memory_bytes)
    free = memory.available_bytes.expected
    beside = memory.adapter_bytes + memory.draft_bytes
    parts = [
        ("#", "weights", memory.weights_bytes - beside),
        *([("a", "adapters", memory.adapter_bytes)] if memory.adapter_bytes else []),
        *([("d", "draft", memory.draft_bytes)] if memory.draft_bytes else []),
        ("+", "overhead", memory.overhead.expected_bytes),
        ("=", "KV cache", max(free, 0.0)),
        (".", "not vLLM's", (1 - launch.utilization) * whole_bytes),
    ]
    columns = min(BAR, width - 20)
    bar = "".join(
        mark * min(round(columns * size / whole_bytes), columns) for mark, _, size in parts
    )
    lines = [f"one GPU, {gibibytes(whole_bytes)}: [{bar[:columns]:<{columns}}]"]
    lines += [
        f"  {mark} {name:<11}{gibibytes(size):>12}{size / whole_bytes:>7.0%}"
        for mark, name, size in parts
    ]
    if free < 0:
        lines.append(f"  {gibibytes(-free)} missing")
    return lines


def _step(step: Step, *, width: int) -> list[str]:
    line = f"{step.title}: {step.formula} = {step.values} = {step.result}"
    if len(line) + len(step.cited) <= width:
        return [f"{line}{step.cited}"]
    return [
        *wrapped(f"{step.title}: {step.formula}", width=width, more=4),
        *wrapped(f"  = {step.values}", width=width, more=4),
        *wrapped(f"  = {step.result}{step.cited}", width=width, more=4),
    ]


def _fewest(answer: Size) -> list[str]:
    fewest = answer.fewest
    if fewest is None:
        return []
    longest = answer.memory.launch.longest_tokens
    what = "Fewest GPUs for one replica"
    if not answer.memory.holds_one:
        what += f" without such a change, at {LONGEST_TOKENS} {longest}"
    if fewest.expected is None:
        return [f"{what}: more than 32"]
    spread = fewest.spread
    layout = ""
    if spread is not None:
        engines = f" x DP {spread.data}" if spread.data > 1 else ""
        layout = f" (TP {spread.tensor} x PP {spread.pipeline}{engines})"
    bounds = f"{fewest.low or 'more than 32'} to {fewest.high or 'more than 32'}"
    uncertain = "" if fewest.low == fewest.high else f", {bounds} within the overhead estimate"
    return [f"{what}: {fewest.expected}{layout}{uncertain}"]


def _rate_on_fewest(answer: Size) -> list[str]:
    """What the stated rate takes with the fewest GPUs, where the launch itself does not start."""
    question, fewest = answer.question, answer.fewest
    spread = None if fewest is None else fewest.spread
    if spread is None or answer.memory.holds_one or question.peak_requests_per_s is None:
        return []
    with suppress(SizingError):
        then = size(replace(question, launch=replace(question.launch, parallel=spread)))
        lines = (*_at_peak(then), *_usable(then), *_price(then))
        return [f"With {spread.gpus} GPUs each: {line}" for line in lines]
    return []


def _speed(answer: Size) -> list[str]:
    speed = answer.performance
    if speed is None:
        return []
    concurrency = answer.question.concurrency_per_engine
    if _at_peak(answer) and answer.question.concurrency is None:
        return _usable(answer)
    engines, together = answer.question.engines, ""
    if engines > 1:
        together = f"; {engines} engines together: "
        together += f"{number(speed.decode_tokens_per_s * engines)} output tokens/s"
    return [
        f"Predicted, not measured, for one engine at {figure(round(concurrency, 1))} "
        f"request{'' if concurrency == 1 else 's'} in flight: "
        f"TTFT {duration(speed.ttft_s)}, ITL {duration(speed.itl_s)}, "
        f"{number(speed.decode_tokens_per_s)} output tokens/s and "
        f"{rate(speed.requests_per_s, 'requests')} with steady arrivals; bound by "
        f"{speed.bound_by}{together}",
        *_waves(answer, concurrency),
        *_usable(answer),
    ]


def _at_peak(answer: Size) -> list[str]:
    """The latencies at the stated peak, or what would serve it; empty if the prediction alone says
    neither."""
    question, served, most_per_s = answer.question, answer.at_peak(), answer.most_requests_per_s
    peak_per_s, is_served = question.peak_requests_per_s, answer.serves_peak
    if peak_per_s is None or not most_per_s or (served is None and is_served is None):
        return []
    load = f"At {figure(peak_per_s)} requests/s on {plural(answer.replicas, 'replica')}"
    if served is None or is_served is False:
        least = ceil(peak_per_s * question.safety * answer.replicas / most_per_s)
        verdict = "NOT SERVED" if served is None else "NOT SURELY SERVED"
        return [
            f"{load}: {verdict}, {rate(most_per_s, 'requests')} at most. Without a "
            f"target it takes {plural(least, 'replica')} or more "
            f"({plural(least * question.launch.parallel.gpus, 'GPU')}) with a safety factor of "
            f"{question.safety:g}"
        ]
    in_flight, latency = served
    return [
        f"{load} (predicted means, not P99): TTFT {duration(latency.ttft_s)}, ITL "
        f"{duration(latency.itl_s)}, {figure(ceil(in_flight))} in flight on each engine"
    ]


def _waves(answer: Size, concurrency: float) -> list[str]:
    """What a benchmark that starts all requests at once measures. Empty for one request."""
    figures = [
        f"TTFT {duration(waves.ttft_s)}, TPOT {duration(waves.itl_s)}, "
        f"{number(waves.output_tokens_per_s)} output tokens/s"
        for rounds in (1, _MANY_ROUNDS)
        if concurrency > 1 and (waves := answer.in_waves(rounds)) is not None
    ]
    where = " on one engine" if answer.question.engines > 1 else ""
    what = f"A benchmark that starts {figure(round(concurrency, 1))} at once{where} "
    what += "(--max-concurrency): "
    many = f"; with {_MANY_ROUNDS} times as many prompts (--num-prompts): "
    return [what + many.join(figures)] if figures else []


def _usable(answer: Size) -> list[str]:
    """The load that a replica can serve within the targets. Empty if the question has a concurrency
    at which the targets are met: the answer then contains the speed at that concurrency."""
    usable_per_s, concurrency = answer.usable_requests_per_s, answer.usable_concurrency
    is_shown = answer.question.concurrency is None or answer.missed
    if usable_per_s is None or concurrency is None or not is_shown:
        return []
    replicas = (
        ""
        if answer.fleet is None
        else f"; {plural(answer.fleet.deployed_instances, 'replica')} with a "
        f"safety factor of {answer.question.safety:g}"
    )
    served = f"{rate(usable_per_s, 'requests')} with {figure(concurrency)} in flight"
    engines = answer.question.launch.parallel.data
    served += f" on each of {engines} engines" if engines > 1 else ""
    asked = answer.question
    margin = f" ({margins(asked.targets, asked.launch)})" if asked.targets.are_set else ""
    return [
        f"Predicted usable within the targets (means, not P99), for one replica: "
        f"{served}{replicas}{margin}"
    ]


def _body(
    answer: Size, first: Sequence[str], compared: Sequence[Lever], *, levered: bool
) -> tuple[list[str], list[str]]:
    """The command, and what follows it: what to change comes first where it is needed."""
    better = levers(answer) if levered and holds_few(answer) else ()
    changes = _listed(answer, "Compared, requests of {} tokens held:", compared)
    head = "What would hold more requests of {} tokens, "
    if better and better[0].lacks:
        head += "none of them enough, by tokens held:"
    else:
        head += "enough first by price, then by tokens held:"
    changes = changes or _listed(answer, head, better[:_SHOWN_LEVERS])
    of_launch = (*_speed(answer), *_price(answer), *_fewest(answer))
    at_load = (*_at_peak(answer), *_rate_on_fewest(answer))
    return _run(answer, better), [*first, *at_load, *changes, *of_launch]


def size_markdown(
    answer: Size,
    *,
    first: Sequence[str] = (),
    extra: Sequence[str] = (),
    compared: Sequence[Lever] = (),
    levered: bool = True,
) -> list[str]:
    """The answer as lines of Markdown. `extra` are the lines of a search or benchmark."""
    command, body = _body(answer, first, compared, levered=levered)
    doubts = [f"Warning: {doubt}" for doubt in answer.doubts]
    lines = [f"# {_verdict(answer)}", "", *doubts, _launch_line(answer), "", *command, *body]
    lines += [f"- {note}" for note in _notes(answer)]
    lines += ["", "```text", *extra, "```", ""] if extra else [""]
    lines += _table(
        ("step", "formula", "values", "result", "source"),
        [
            (step.title, step.formula, step.values, step.result, step.cited.strip(" []"))
            for step in (*memory_steps(answer.memory), *answer.sheet.steps)
        ],
    )
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
