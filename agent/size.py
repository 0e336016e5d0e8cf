"""The `size` command: flags in, the answer out. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from kneewatch.agent.model_files import named_model
from kneewatch.agent.printing import NO_DATA, OK, say, style
from kneewatch.diagnose.catalogue.gpus import GIB, gpu, gpus, recognise
from kneewatch.diagnose.catalogue.gpus import Gpu as GpuRecord
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.benchmark.operating_point import OperatingPoint, operating_point
from kneewatch.diagnose.sizing.benchmark.reading import read_benchmark
from kneewatch.diagnose.sizing.fleet.fleet import SAFETY_DEFAULT
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.vllm_defaults import LATEST, parse_version
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU, Parallel
from kneewatch.diagnose.sizing.plan.profile_reader import example_profile, read_profile
from kneewatch.diagnose.sizing.plan.text import plan_document, plan_lines
from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
from kneewatch.diagnose.sizing.search.answer import question_of
from kneewatch.diagnose.sizing.search.report import document, explain
from kneewatch.diagnose.sizing.search.search import search
from kneewatch.diagnose.sizing.search.space import Choices
from kneewatch.diagnose.sizing.size import Question, Size, size
from kneewatch.reports.operating_point import operating_point_document, operating_point_lines
from kneewatch.reports.size_document import nothing_document, size_document
from kneewatch.reports.size_text import size_markdown, size_text

LARGEST_TEXT_BYTES = 4 * 1024 * 1024
DOES_NOT_FIT = 1

# Where an input's name in the math is not its flag's name.
_FLAGS = {
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "peak_requests_per_s": "--peak-rps",
    "usable_requests_per_s": "--usable-rps",
    "utilization_ratio": "--utilization",
    "peak_rps": "--peak-rps",
    "data_parallel": "--dp",
}


def run(*, form: str, **given: Any) -> int:  # noqa: ANN401 - one keyword a flag
    """Print the answer. Returns the exit status: 0 fits, 1 does not, 2 cannot be sized."""
    try:
        told_size = _plan(given) if given["plan"] else _sized(given)
    except SizingError as error:
        say(told(error))
        return NO_DATA
    if form == "json":
        click.echo(orjson.dumps(told_size.document, option=orjson.OPT_INDENT_2))
    elif form == "markdown":
        click.echo("\n".join(told_size.markdown))
    else:
        click.echo("\n".join(told_size.text))
    return OK if told_size.document["fits"] else DOES_NOT_FIT


@dataclass(frozen=True, slots=True)
class Told:
    """An answer in every form."""

    document: Mapping[str, Any]
    text: Sequence[str]
    markdown: Sequence[str]


def _sized(given: dict[str, Any]) -> Told:
    """One launch, or with --search the cheapest; with --benchmark at its usable RPS."""
    point = _operating_point(given)
    question = _question(given, point.usable_requests_per_s if point else None)
    extra: dict[str, Any] = {}
    lines: list[str] = []
    if point is not None:
        extra["operating_point"] = operating_point_document(point)
        lines += operating_point_lines(point)
    answer: Size | None
    if given["search"]:
        found = search(question, _choices(given))
        extra["search"] = document(found)
        lines += explain(found)
        answer = size(question_of(question, found.winner)) if found.winner else None
    else:
        answer = size(question)
    if answer is None:
        return Told(nothing_document(extra), lines, lines)
    width = style().width
    return Told(
        size_document(answer) | extra,
        [*size_text(answer, width=width), *_apart(lines)],
        [*size_markdown(answer), *_apart(lines)],
    )


def _apart(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _choices(given: dict[str, Any]) -> Choices:
    """What the user stated is fixed; the rest is tried, on cards made for data centres."""
    for flag in ("dp", "dcp", "concurrency", "expert_parallel", "benchmark"):
        if given[flag] not in (None, False, 1):
            raise SizingError("a search finds that itself, or does not try it", name=flag)
    ids = None
    if given["gpu"] is None:
        ids = [key for key, card in gpus().items() if card.segment == "data-centre"]
    return Choices(
        gpu_ids=ids,
        tensor_parallels=None if given["tp"] is None else [given["tp"]],
        pipeline_parallels=None if given["pp"] == 1 else [given["pp"]],
        kv_cache_dtypes=None if given["kv_cache_dtype"] == "auto" else [given["kv_cache_dtype"]],
        most_gpus=given["gpus"],
    )


def _operating_point(given: dict[str, Any]) -> OperatingPoint | None:
    if given["benchmark"] is None:
        return None
    if given["usable_rps"] is not None:
        raise SizingError(
            "the benchmark gives the usable RPS; state one of them", name="usable_rps"
        )
    return operating_point(
        benchmark=read_benchmark(_text(given["benchmark"], "benchmark")),
        ttft_p99_s=given["ttft_slo"],
        itl_p99_s=given["itl_slo"],
    )


def _plan(given: dict[str, Any]) -> Told:
    """The guide's thirteen steps for a workload profile; `example` is the shipped one."""
    path = given["plan"]
    for flag in ("search", "benchmark"):
        if given[flag]:
            raise SizingError("a plan does that itself", name=flag)
    text = example_profile() if path == "example" else _text(path, "plan")
    profile = read_profile(text, origin=path, stated=_over_profile(given))
    folder = Path(path).parent
    texts = {name: _text(str(folder / name), "plan") for name in profile.benchmark_files}
    models = {name: named_model(name) for name in profile.models}
    found = plan(profile, models=models, benchmarks=texts)
    told_plan = {"plan": plan_document(found)}
    lines = plan_lines(found)
    return Told(nothing_document(told_plan, fits=found.gpus is not None), lines, lines)


# Flags that win over what a profile says, by the profile's table and key.
_PROFILE_KEYS = {
    "model": ("deployment", "model"),
    "tp": ("deployment", "tensor_parallel"),
    "quantization": ("deployment", "quantization"),
    "max_model_len": ("deployment", "max_model_len"),
    "usable_rps": ("deployment", "usable_requests_per_s"),
    "usd_per_gpu_hour": ("deployment", "usd_per_gpu_hour"),
    "peak_rps": ("traffic", "peak_requests_per_s"),
    "ttft_slo": ("slo", "ttft_p99_s"),
    "itl_slo": ("slo", "itl_p99_s"),
}


def _over_profile(given: dict[str, Any]) -> dict[str, dict[str, object]]:
    stated: dict[str, dict[str, object]] = {}
    for flag, (table, key) in _PROFILE_KEYS.items():
        if given[flag] is not None:
            stated.setdefault(table, {})[key] = given[flag]
    if given["gpu"] is not None:
        stated.setdefault("deployment", {})["gpus"] = [named_gpu(given["gpu"]).id]
    if given["kv_cache_dtype"] != "auto":
        stated.setdefault("deployment", {})["kv_cache_dtype"] = given["kv_cache_dtype"]
    return stated


def _text(path: str, name: str) -> str:
    """A text file of the user's.

    Raises:
        SizingError: it cannot be read.
    """
    try:
        if not Path(path).is_file():
            reason = "is no regular file" if Path(path).exists() else "is not there"
            raise SizingError(f"{path} {reason}", name=name)
        if Path(path).stat().st_size > LARGEST_TEXT_BYTES:
            raise SizingError(f"{path} is larger than {LARGEST_TEXT_BYTES:,} bytes", name=name)
        return Path(path).read_text("utf-8")
    except OSError as exc:
        raise SizingError(f"{path[:200]} cannot be read: {exc.strerror}", name=name) from exc
    except UnicodeDecodeError as exc:
        raise SizingError(f"{path} is no text file", name=name) from exc


def told(error: SizingError) -> str:
    """The error with the flag that it is about, and what could be said instead."""
    flag = _FLAGS.get(error.name, "--" + error.name.replace("_", "-"))
    choices = f"; choices: {', '.join(error.choices)}" if error.choices else ""
    return f"{flag}: {error}{choices}"


def _question(given: dict[str, Any], usable_requests_per_s: float | None) -> Question:
    parallel, replicas = _spread(given)
    if given["search"]:
        parallel, replicas = ONE_GPU, 1
    if given["search"] and given["tp"]:
        parallel = Parallel(tensor=given["tp"])
    return Question(
        setup=_setup(given, parallel),
        replicas=replicas,
        concurrency=given["concurrency"],
        input_tokens=given["input_tokens"],
        output_tokens=given["output_tokens"],
        peak_requests_per_s=given["peak_rps"],
        usable_requests_per_s=(
            usable_requests_per_s if given["usable_rps"] is None else given["usable_rps"]
        ),
        ttft_slo_s=given["ttft_slo"],
        itl_slo_s=given["itl_slo"],
        safety=SAFETY_DEFAULT if given["safety"] is None else given["safety"],
        usd_per_gpu_hour=given["usd_per_gpu_hour"],
        utilization_ratio=given["utilization"],
    )


def _setup(given: dict[str, Any], parallel: Parallel) -> Setup:
    version = given["vllm_version"]
    return Setup(
        model=_model(given["model"]),
        gpu=named_gpu(given["gpu"]) if given["gpu"] else None,
        parallel=parallel,
        quantization=given["quantization"],
        kv_cache_dtype=given["kv_cache_dtype"],
        version=parse_version(version) if version else LATEST,
        gpu_memory_utilization=given["gpu_memory_utilization"],
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        block_tokens=given["block_size"],
        decode_context_parallel=given["dcp"],
        enforce_eager=given["enforce_eager"],
        hybrid_pool=not given["disable_hybrid_kv_cache_manager"],
        prefix_caching=not given["no_enable_prefix_caching"],
        overhead=given["overhead"] or "fitted",
        weights_bytes=_gib("weights_gib", given["weights_gib"]),
        available_kv_bytes=_gib("available_kv_gib", given["available_kv_gib"]),
        context_tokens=given["context"],
    )


def _model(name: str | None) -> Model:
    if name is None:
        raise SizingError(
            "state a model: a catalogue id or the path of its config.json", name="model"
        )
    return named_model(name)


def named_gpu(name: str) -> GpuRecord:
    """The catalogue's GPU by id or by the name that the driver gives.

    Raises:
        SizingError: neither.
    """
    return recognise(name) or gpu(name)


def _gib(name: str, stated: float | None) -> float | None:
    if stated is None:
        return None
    # A pebibyte: more than any GPU will have for a while.
    if not 0 <= stated <= 1 << 20:
        raise SizingError(f"{stated:g} GiB cannot be", name=name)
    return stated * GIB


def _spread(given: dict[str, Any]) -> tuple[Parallel, int]:
    """One replica's parallel sizes, and how many replicas the GPUs make."""
    for flag in ("tp", "pp", "dp", "dcp", "gpus"):
        value = given[flag]
        if value is not None and not 1 <= value <= 4096:
            raise SizingError(f"{value} cannot be; state a whole number from 1", name=flag)
    tp, pp, dp, gpus = given["tp"], given["pp"], given["dp"], given["gpus"]
    if tp is None:
        tp = 1 if gpus is None else max(gpus // (pp * dp), 1)
    each = tp * pp * dp
    replicas = 1 if gpus is None else gpus // each
    if gpus is not None and gpus != replicas * each:
        raise SizingError(
            f"{gpus} GPUs are no multiple of TP {tp} x PP {pp} x DP {dp}",
            name="gpus",
            choices=[str(each * count) for count in (1, 2, 4)],
        )
    return Parallel(tensor=tp, pipeline=pp, data=dp, experts=given["expert_parallel"]), replicas
