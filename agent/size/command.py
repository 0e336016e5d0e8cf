"""The `size` command: flags in, a size or a plan out. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import orjson

from kneewatch.agent.console import NO_DATA, OK, say
from kneewatch.agent.printing import style
from kneewatch.agent.size.inputs import asked, choices_of, over_profile, refuse_ignored_by_plan
from kneewatch.agent.stated_deployment import named_model, profile_text, sweeps_of, text_of
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark
from kneewatch.diagnose.sizing.benchmark.operating_point import (
    OperatingPoint,
    Sweep,
    operating_point,
)
from kneewatch.diagnose.sizing.benchmark.reports import read_benchmark
from kneewatch.diagnose.sizing.configuration_search import search
from kneewatch.diagnose.sizing.plan.plan_result import plan_document, plan_lines
from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
from kneewatch.diagnose.sizing.plan.workload_profile import read_profile
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.search_results import document, explain, question_of
from kneewatch.diagnose.sizing.serving_cost import Scaling, scaling
from kneewatch.diagnose.sizing.size import Size, size
from kneewatch.reports.size_json import nothing_document, price_of, size_document
from kneewatch.reports.size_text import (
    operating_point_document,
    operating_point_lines,
    scaling_document,
    scaling_lines,
    size_markdown,
    size_text,
)

DOES_NOT_FIT = 1

# Flags whose names differ from the inputs of the sizing code.
_FLAGS = {
    "tp": "--tensor-parallel",
    "pipeline_parallel": "--pp",
    "peak_requests_per_s": "--peak-rps",
    "usable_requests_per_s": "--usable-rps",
    "utilization_ratio": "--utilization",
    "peak_rps": "--peak-rps",
    "data_parallel": "--dp",
    "hybrid_pool": "--disable-hybrid-kv-cache-manager",
}


def run(*, form: str, **given: Any) -> int:  # noqa: ANN401 - one keyword a flag
    """Print the answer. Returns the exit status: 0 fits, 1 does not fit, 2 cannot be sized."""
    try:
        answer = _plan(given) if given["plan"] else _sized(given)
    except SizingError as error:
        say(error_text(error))
        return NO_DATA
    if form == "json":
        click.echo(orjson.dumps(answer.document, option=orjson.OPT_INDENT_2))
    elif form == "markdown":
        click.echo("\n".join(answer.markdown))
    else:
        click.echo("\n".join(answer.text))
    return OK if answer.document["fits"] else DOES_NOT_FIT


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in every output format."""

    document: Mapping[str, Any]
    text: Sequence[str]
    markdown: Sequence[str]


def _sized(given: dict[str, Any]) -> Answer:
    """The size of one launch, or with --search of the cheapest; with a benchmark, at its usable
    requests per second."""
    sweeps = sweeps_of(given["benchmark_by_tensor_parallel"])
    plain = asked(given, None)
    point = _operating_point(given, _measured(given, sweeps, plain))
    question = plain
    if point is not None and point.usable_requests_per_s is not None:
        question = replace(plain, usable_requests_per_s=point.usable_requests_per_s)
    extra: dict[str, Any] = {}
    lines: list[str] = []
    if sweeps:
        degrees = _scaling(sweeps, question)
        extra["benchmark_by_tensor_parallel"] = scaling_document(degrees)
        lines += scaling_lines(degrees)
    if point is not None:
        extra["operating_point"] = operating_point_document(point)
        lines += operating_point_lines(point)
    answer: Size | None
    if given["search"]:
        result = search(question, choices_of(given))
        extra["search"] = document(result)
        lines += explain(result)
        answer = size(question_of(question, result.winner)) if result.winner else None
    else:
        answer = size(question)
    if answer is None:
        return Answer(nothing_document(extra), lines, lines)
    width = style().width
    return Answer(
        size_document(answer) | extra,
        [*size_text(answer, width=width), *_after_blank(lines)],
        [*size_markdown(answer), *_after_blank(lines)],
    )


def _after_blank(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _measured(
    given: dict[str, Any], sweeps: Sequence[Sweep], question: Question
) -> Benchmark | None:
    """The benchmark of the launch: --benchmark, else the sweep of its tensor parallel size.

    The sweep is used where a latency target and no usable RPS is stated.
    """
    if given["benchmark"] is not None:
        return read_benchmark(text_of(given["benchmark"], "benchmark"))
    if not question.has_target or given["usable_rps"] is not None:
        return None
    tensor = question.setup.parallel.tensor
    return next((sweep.benchmark for sweep in sweeps if sweep.tensor_parallel == tensor), None)


def _operating_point(given: dict[str, Any], measured: Benchmark | None) -> OperatingPoint | None:
    if measured is None:
        return None
    if given["usable_rps"] is not None:
        raise SizingError(
            "the benchmark gives the usable RPS: set only one of the two", name="usable_rps"
        )
    return operating_point(
        benchmark=measured, ttft_p99_s=given["ttft_slo"], itl_p99_s=given["itl_slo"]
    )


def _scaling(sweeps: Sequence[Sweep], question: Question) -> Scaling:
    if question.setup.parallel.pipeline > 1:
        raise SizingError(
            "sweeps by tensor parallel size need a pipeline size of 1", name="pipeline_parallel"
        )
    return scaling(
        sweeps,
        ttft_p99_s=question.ttft_slo_s,
        itl_p99_s=question.itl_slo_s,
        usd_per_gpu_hour=price_of(question),
        utilization_ratio=question.full_load_ratio,
    )


def _plan(given: dict[str, Any]) -> Answer:
    """The guide's thirteen steps for a workload profile."""
    path = given["plan"]
    text = profile_text(path, "plan")
    refuse_ignored_by_plan(given)
    profile = read_profile(text, origin=path, stated=over_profile(given))
    folder = Path(path).parent
    texts = {name: text_of(str(folder / name), "plan") for name in profile.benchmark_files}
    models = {name: named_model(name) for name in profile.models}
    result = plan(profile, models=models, benchmarks=texts)
    members = {"plan": plan_document(result)}
    lines = plan_lines(result)
    return Answer(nothing_document(members, fits=result.gpus is not None), lines, lines)


def error_text(error: SizingError) -> str:
    """The error as text, with its flag and the valid choices."""
    flag = _FLAGS.get(error.name, "--" + error.name.replace("_", "-"))
    # A switch takes no value.
    listed = () if error.name == "hybrid_pool" else error.choices
    choices = f"; choices: {', '.join(listed)}" if listed else ""
    return f"{flag}: {error}{choices}"
