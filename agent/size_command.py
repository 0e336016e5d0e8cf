"""The `size` command: turns flags and files into a size or a plan. I/O edge."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import ceil, prod
from pathlib import Path
from typing import Any, cast

import click
import orjson
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.console import NO_DATA, OK, say, text_width
from kneewatch.agent.settings.table import ITL_TARGET_MOST_S, KINDS, TTFT_TARGET_MOST_S
from kneewatch.agent.settings.table import SIZE_FLAGS as FLAGS
from kneewatch.agent.stated_deployment import (
    named_gpu,
    named_model,
    profile_text,
    sweeps_of,
    text_of,
)
from kneewatch.collector.engines.engine_kind import (
    ADAPTERS,
    LONGEST_TOKENS,
    SPECULATION,
    EngineKind,
    engine_kinds,
    sized_kinds,
)
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.files import yaml_document
from kneewatch.diagnose.catalogue.gpu_specs import Gpu, stated_gpu
from kneewatch.diagnose.catalogue.hf_config import mapping
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.deployment.vllm_flags import (
    UNKNOWN,
    UNREAD_SINCE,
    UNREAD_VARIABLES,
    VLLM,
    CommandLine,
    command_values,
    commands,
    effect_of,
    image_version,
    is_dropped,
    parameter_of,
    parse_command,
)
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark
from kneewatch.diagnose.sizing.benchmark.operating_point import (
    Sweeps,
    achieved,
    matched,
    operating_point,
)
from kneewatch.diagnose.sizing.benchmark.reports import read_benchmark
from kneewatch.diagnose.sizing.configuration_search import Choices, search
from kneewatch.diagnose.sizing.launch_notes import most_utilization
from kneewatch.diagnose.sizing.levers import Lever, as_sized, lever_document
from kneewatch.diagnose.sizing.memory.launch import (
    LATEST,
    Launch,
    bytes_of,
    fields_of,
    launch_of,
    parse_version,
)
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU, Draft, Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.search_results import brief, decided, document, explain, question_of
from kneewatch.diagnose.sizing.serving_cost import scaling
from kneewatch.diagnose.sizing.size import Size, for_users, size, with_longest
from kneewatch.reports.size_rendering import (
    achieved_lines,
    nothing_document,
    operating_point_document,
    operating_point_lines,
    scaling_document,
    scaling_lines,
    size_document,
    size_markdown,
    size_text,
)
from kneewatch.rules.facts import Targets

OWN_DRAFT = "mtp"
# What a container runs, in the order of its words (Kubernetes, Compose).
_RUN = ("entrypoint", "command", "args")


def stated_question(given: dict[str, Any], find: Callable[[str], Model] = named_model) -> Question:
    """The sizing question that the flags describe. `find` returns a model by name.

    Raises:
        SizingError: the value of a flag is invalid; the error has the flag's name.
    """
    parallel, replicas = _spread(given)
    if given["search"]:
        parallel, replicas = ONE_GPU, 1
    if given["search"] and given["tp"]:
        parallel = Parallel(tensor=given["tp"])
    users = given["users"]
    if users is not None and (given["gpus"] is not None or given["concurrency"] is not None):
        why = "counts the GPUs: leave out their number, or set --concurrency in place of --users"
        raise SizingError(why, name="users")
    stated = {
        name: given[flag.parameter]
        for flag in FLAGS
        if (name := flag.input or flag.parameter) in Question.__struct_fields__
        and given[flag.parameter] is not None
    }
    stated |= {"launch": _launch(given, parallel, find), "replicas": replicas}
    stated["targets"] = Targets(
        _target("ttft_slo", given["ttft_slo"], TTFT_TARGET_MOST_S),
        _target("itl_slo", given["itl_slo"], ITL_TARGET_MOST_S),
    )
    question = Question(**stated)
    sizes = (1, 2, 4, 8) if given["tp"] is None else (given["tp"],)
    return question if users is None else for_users(question, users, sizes)


def _launch(given: dict[str, Any], parallel: Parallel, find: Callable[[str], Model]) -> Launch:
    version = given["vllm_version"]
    if given["model"] is None:
        raise SizingError("required: a catalogue id or the path of a config.json", name="model")
    model = find(given["model"])
    settled = given.get("settled", ())
    try:
        draft = _draft(given, model, find)
    except SizingError as error:
        if not given["launch"]:
            raise
        # vLLM may know a draft that the catalogue does not: the launch is sized without it.
        draft, settled = None, (*settled, f"sized without its draft: {error}")
        given = given | {"other_flags": (*given.get("other_flags", ()), *given["drafting"])}
    model = replace(model, notes=(*given.get("ignored", ()), *model.notes))
    fields = fields_of(given)
    if {"kv_cache_memory_bytes", "available_kv_bytes"} <= fields.keys():
        raise SizingError("set this or --available-kv-gib", name="kv_cache_memory_bytes")
    fields["other_flags"] = (*given.get("other_flags", ()), *fields["other_flags"])
    fields["auto_context"] = bool(given.get("auto_context")) and fields.get("max_model_len") is None
    fields["settled"] = (*settled, *_without_effect(fields))
    fields |= {"parallel": parallel, "draft": draft}
    fields["version"] = parse_version(version) if version else LATEST
    launch = _with_own_kv_cache(launch_of(model, _gpu(given), fields))
    shared = launch.gpu is not None and launch.gpu.shares_host_memory and launch.slack is None
    if shared and launch.gpu_memory_utilization is None:
        # vLLM's default share is more than the host leaves free.
        return replace(launch, gpu_memory_utilization=most_utilization(launch.gpu))
    return launch


# vllm-project/vllm pull request 29980, of December 2025.
_OWN_KV_CACHE_FROM = parse_version("0.14")


def _with_own_kv_cache(launch: Launch) -> Launch:
    """The launch with the KV cache that its checkpoint asks for, where none is stated."""
    own, is_vllm = launch.model.kv_cache_dtype, launch.slack is None
    if not is_vllm or "auto" not in launch.kv_cache_dtype or launch.version < _OWN_KV_CACHE_FROM:
        return launch
    if own == "auto":
        return launch
    why = f"KV cache in {own}: the checkpoint asks for it, and vLLM takes that for auto"
    return replace(launch, kv_cache_dtype=own, settled=(*launch.settled, why))


# Flags that have no effect beside another one, by the fields of both.
_OVERRULED = (
    ("gpu_memory_utilization", "kv_cache_memory_bytes"),
    ("cudagraph_capture_sizes", "enforce_eager"),
    ("max_cudagraph_capture_size", "enforce_eager"),
    ("limit_mm_per_prompt", "language_model_only"),
)


def _without_effect(fields: Mapping[str, Any]) -> Iterator[str]:
    flags = {flag.field: flag.launch for flag in VLLM.values() if flag.field}
    for overruled, by in _OVERRULED:
        if fields.get(overruled) and fields.get(by):
            yield f"{flags[overruled]} has no effect beside {flags[by]}"


def _gpu(given: dict[str, Any]) -> Gpu | None:
    """The GPU of the catalogue with what is stated of it, or one of these figures alone."""
    named = named_gpu(given["gpu"]) if given["gpu"] else None
    memory_gib, bandwidth = given["gpu_memory_gib"], given["gpu_bandwidth"]
    memory_bytes = None if memory_gib is None else bytes_of("gpu_memory_gib", memory_gib)
    if bandwidth is not None and not 1 <= bandwidth <= 1_000_000:
        raise SizingError(f"{bandwidth:g} GB/s is out of range", name="gpu_bandwidth")
    if memory_bytes is None and bandwidth is None:
        return named
    if named is None and memory_bytes is None:
        raise SizingError("set the memory of this GPU", name="gpu_memory_gib")
    return stated_gpu(named, memory_bytes, bandwidth and bandwidth * 1e9)


def _draft(given: dict[str, Any], target: Model, find: Callable[[str], Model]) -> Draft | None:
    name, tokens = given["draft_model"], given["num_speculative_tokens"]
    if name is None and tokens is None:
        return None
    if name is None:
        raise SizingError(
            "set the draft model; n-gram drafting takes no memory and needs no flag",
            name="draft_model",
        )
    if tokens is None:
        raise SizingError(
            "set how many tokens the draft model proposes", name="num_speculative_tokens"
        )
    if name == OWN_DRAFT:
        if target.own_draft is None:
            raise SizingError(
                f"{target.id} has no MTP layers that vLLM drafts with", name="draft_model"
            )
        return Draft(target.own_draft, tokens)
    try:
        return Draft(find(name), tokens)
    except SizingError as error:
        raise SizingError(str(error), name="draft_model", choices=error.choices) from error


def _target(name: str, stated_s: float | None, most_s: float) -> float | None:
    if stated_s is not None and stated_s > most_s:
        raise SizingError(
            f"{stated_s:g} s is out of range: at most {most_s:g} s; "
            f"write {stated_s:g}ms for milliseconds",
            name=name,
        )
    return stated_s


def _spread(given: dict[str, Any]) -> tuple[Parallel, int]:
    """The parallel sizes of one replica, and the number of replicas that the GPUs allow."""
    for flag in ("tp", "pp", "dp", "dcp", "gpus"):
        value = given[flag]
        if value is not None and not 1 <= value <= 4096:
            raise SizingError(f"{value} is out of range: 1 to 4096 are allowed", name=flag)
    tp, pp, dp, gpus = given["tp"], given["pp"], given["dp"], given["gpus"]
    if tp is None:
        tp = 1 if gpus is None else max(gpus // (pp * dp), 1)
    per_replica = tp * pp * dp
    replicas = 1 if gpus is None else gpus // per_replica
    if gpus is not None and gpus != replicas * per_replica:
        raise SizingError(
            f"{gpus} GPUs are not a multiple of TP {tp} x PP {pp} x DP {dp}",
            name="gpus",
            choices=[str(per_replica * count) for count in (1, 2, 4)],
        )
    return Parallel(tensor=tp, pipeline=pp, data=dp, experts=given["expert_parallel"]), replicas


def refuse_ignored_by_plan(given: dict[str, Any]) -> None:
    """Refuse flags that have no effect with `--plan`.

    Raises:
        SizingError: such a flag is set; the error has the flag's name.
    """
    for flag in FLAGS:
        is_ignored = not flag.profile_key and flag.parameter != "plan"
        if is_ignored and given[flag.parameter] != flag.default:
            decided = (
                "is decided by the plan" if flag.kind == "switch" else "is read from the profile"
            )
            raise SizingError(
                f"not available with --plan: it {decided} (docs/how-to/plan.md)",
                name=flag.parameter,
            )


def over_profile(given: dict[str, Any]) -> dict[str, dict[str, object]]:
    """The flags that override the workload profile: their values by table and key of the
    profile."""
    stated: dict[str, dict[str, object]] = {}
    for flag in FLAGS:
        value = given[flag.parameter]
        if flag.profile_key and value != flag.default:
            table, _, key = flag.profile_key.partition(".")
            value = [named_gpu(value).id] if flag.parameter == "gpu" else value
            stated.setdefault(table, {})[key] = value
    return stated


def choices_of(given: dict[str, Any]) -> Choices:
    """The values that `--search` may vary: those that no flag sets.

    Raises:
        SizingError: a flag is set that cannot be used with `--search`.
    """
    sweeps = ("benchmark", "benchmark_by_tensor_parallel")
    for flag in ("dcp", "concurrency", "users", "compare", *sweeps):
        if given[flag] not in (None, False, 1, ()):
            raise SizingError("not available with --search", name=flag)
    allowed: str = given["gpus_allowed"] or ""
    return Choices(
        tensor_parallel=given["tp"],
        pipeline_parallel=None if given["pp"] == 1 else given["pp"],
        data_parallel=None if given["dp"] == 1 else given["dp"],
        expert_parallel=given["expert_parallel"],
        most_gpus=given["gpus"],
        gpus=tuple(named_gpu(name.strip()) for name in allowed.split(",") if name),
    )


# --- The `size` command: flags in, a size or a plan out. I/O edge ---------------------------------


DOES_NOT_FIT = 1

_BY_INPUT = {flag.input or flag.parameter: flag.alias or flag.name for flag in FLAGS}


def run(*, form: str, whole: bool, words: Sequence[str] = (), **given: Any) -> int:  # noqa: ANN401
    """Print the size or plan; `whole`: with the arithmetic.

    Returns the exit status: 0 fits, 1 does not fit, misses a target or does not serve the rate,
    2 cannot be sized."""
    try:
        given = with_words(given, words)
        answer = _plan(given, form) if given["plan"] or form == "toml" else sized(given)
    except SizingError as error:
        say(error_text(error))
        return NO_DATA
    if form == "json":
        click.echo(orjson.dumps(answer.document(), option=orjson.OPT_INDENT_2))
    elif form == "markdown":
        click.echo("\n".join(answer.markdown()))
    elif form == "toml":
        click.echo("\n".join(answer.settings))
    else:
        click.echo("\n".join(answer.text(text_width(), whole=whole)))
    return OK if answer.succeeds else DOES_NOT_FIT


class Answer(Struct, frozen=True):
    """The answer to the flags of `size`: a launch's size, or None for a plan or a search without a
    result. `extra` and `lines` are what is said beside the size, as JSON and as text; `brief` are
    the lines without arithmetic, `settings` a plan as the daemon's settings, `first` what
    stands behind the verdict."""

    size: Size | None
    extra: Mapping[str, Any]
    lines: Sequence[str]
    succeeds: bool
    brief: Sequence[str]
    compared: Sequence[Lever] = ()
    settings: Sequence[str] = ()
    first: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document kneewatch.size/1."""
        if self.size is None:
            return nothing_document(self.extra, fits=self.succeeds)
        return size_document(self.size) | dict(self.extra)

    def text(self, width: int, *, whole: bool) -> Sequence[str]:
        """Lines of text of at most this width; `whole`: with the arithmetic."""
        written = partial(size_text, width=width, whole=whole)
        return self._written(written, self.lines if whole else self.brief)

    def markdown(self) -> Sequence[str]:
        return self._written(size_markdown, self.lines)

    def _written(self, form: Callable[..., list[str]], extra: Sequence[str]) -> Sequence[str]:
        if self.size is None:
            return extra
        # A search has tried what levers change.
        levered = "search" not in self.extra
        said = {"first": self.first, "extra": extra, "compared": self.compared}
        text = form(self.size, **said, levered=levered)
        return [self.size.question.launch.kind.said(line) for line in text]


def sized(given: dict[str, Any], find: Callable[[str], Model] = named_model) -> Answer:
    """The size of one launch; with `--search`, of the cheapest launch. With a benchmark, the launch
    is sized for the usable requests/s that the benchmark shows. `find` returns a model by name.

    Raises:
        SizingError: the value of a flag is invalid; the error has the flag's name.
    """
    asked, given = given, with_launch(given)
    plain = stated_question(given, find)
    plain = plain if given["search"] else with_longest(plain)
    sweeps = {
        tensor: _of_launch(benchmark, plain)
        for tensor, benchmark in sweeps_of(given["benchmark_by_tensor_parallel"]).items()
    }
    measured = _measured(given, sweeps, plain)
    point = None if measured is None else operating_point(measured, plain.targets)
    question = plain
    if point is not None and point.usable_requests_per_s is not None:
        question = replace(
            plain, usable_requests_per_s=point.usable_requests_per_s, is_benchmarked=True
        )
    extra: dict[str, Any] = {}
    lines: list[str] = []
    if sweeps:
        if question.launch.parallel.pipeline > 1:
            raise SizingError(
                "sweeps by tensor parallel size need a pipeline size of 1", name="pipeline_parallel"
            )
        price, full_ratio = question.price_usd_per_gpu_hour, question.full_load_ratio
        degrees = scaling(
            sweeps, question.targets, usd_per_gpu_hour=price, utilization_ratio=full_ratio
        )
        extra["benchmark_by_tensor_parallel"] = scaling_document(degrees)
        lines += scaling_lines(degrees)
    if point is not None:
        extra["operating_point"] = operating_point_document(point)
        lines += operating_point_lines(point)
    brief_lines, first = lines, [] if given["tp"] else _search_command(asked, plain)
    if given["search"]:
        result = search(question, choices_of(given))
        answer = size(question_of(result.question, result.winner)) if result.winner else None
        extra["search"] = document(result, answer)
        brief_lines = [*lines, *brief(result)]
        lines += explain(result)
        first = decided(result)
    else:
        answer = size(question)
    if answer is not None and answer.performance is not None and point and point.c_max:
        engines = answer.question.launch.parallel.data
        reached = achieved(point.c_max, answer.performance.loop, engines=engines)
        extra["operating_point"] |= {name: round(ratio, 4) for name, ratio in reached.items()}
        lines += achieved_lines(reached)
    compared = list[Lever]()
    if answer is not None and (given["compare"] or answer.question.acceptance_ratio is not None):
        others = _alternatives(given, find) if given["compare"] else [_undrafted(answer)]
        compared = [as_sized("as stated", answer), *others]
        extra["compare"] = [lever_document(each) for each in compared]
    succeeds = answer is not None and answer.succeeds
    return Answer(answer, extra, lines, succeeds, brief_lines, compared, first=first)


def _search_command(given: dict[str, Any], question: Question) -> list[str]:
    """The same question with `--search`, where a rate and targets are set and the split is not."""
    has_load = question.peak_requests_per_s and question.targets.are_set
    if given["search"] or given["gpus"] or not has_load:
        return []
    with suppress(SizingError):
        choices_of(given)
        words = ["kneewatch", "size", *filter(None, [given["launch"]]), "--search"]
        for flag in FLAGS:
            value = given[flag.parameter]
            if value != flag.default and flag.parameter != "launch":
                unit = "s" if flag.kind == "seconds" else ""
                words += filter(None, (flag.alias or flag.name, flag.text(value) + unit))
        for parameter in ("input_tokens", "output_tokens"):
            words += [] if given[parameter] else [f"--{parameter.replace('_', '-')}", "N"]
        return [f"--search compares splits and precisions: {shlex.join(words)}"]
    return []


def _undrafted(answer: Size) -> Lever:
    question = answer.question
    launch = replace(question.launch, draft=None)
    plain = size(replace(question, launch=launch, acceptance_ratio=None))
    return as_sized("without the draft", plain)


def _alternatives(given: dict[str, Any], find: Callable[[str], Model]) -> Iterator[Lever]:
    """The launches that `--compare` names: comma-separated GPUs, or flags joined by +.

    Raises:
        SizingError: a flag or its value is unknown.
    """
    for name in given["compare"].split(","):
        changed = dict(given)
        for stated in name.split("+"):
            key, is_flag, value = stated.strip().rpartition("=")
            parameter = parameter_of(key) if is_flag else "gpu"
            flag = next((flag for flag in FLAGS if flag.parameter == parameter), None)
            try:
                kind = click.types.convert_type(None if flag is None else KINDS[flag.kind])
                changed[parameter] = kind.convert(value, None, None)
            except click.BadParameter as error:
                raise SizingError(f"{stated}: {error.message}", name="compare") from error
            if flag is None or flag.multiple or flag.names_file:
                raise SizingError(f"{key} is no flag to compare by", name="compare")
        yield as_sized(
            name.strip(), size(with_longest(stated_question(_filled(changed, given), find)))
        )


def _filled(changed: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The flags with as many GPUs more as the last replica of another split lacks."""
    splits = "tp", "pp", "dp"
    gpus, each = changed["gpus"], prod(changed[flag] or 1 for flag in splits)
    is_split = any(changed[flag] != given[flag] for flag in splits)
    if gpus is None or gpus != given["gpus"] or not is_split:
        return changed
    return changed | {"gpus": ceil(gpus / each) * each}


def _measured(given: dict[str, Any], sweeps: Sweeps, question: Question) -> Benchmark | None:
    """The benchmark of the launch: `--benchmark`, else the sweep with the launch's tensor parallel
    size.

    The sweep is used only if a latency target is set and `--usable-rps` is not.
    """
    if given["benchmark"] is not None:
        if given["usable_rps"] is not None:
            raise SizingError(
                "the benchmark gives the usable RPS: set only one of the two", name="usable_rps"
            )
        return _of_launch(read_benchmark(text_of(given["benchmark"], "benchmark")), question)
    if not question.targets.are_set or given["usable_rps"] is not None:
        return None
    return sweeps.get(question.launch.parallel.tensor)


def _of_launch(benchmark: Benchmark, question: Question) -> Benchmark:
    """The benchmark with doubts whether it is of this launch and of such requests.

    Raises:
        SizingError: it is of another model.
    """
    return matched(
        benchmark,
        question.launch.model,
        input_tokens=question.input_tokens,
        output_tokens=question.output_tokens,
    )


def _plan(given: dict[str, Any], form: str) -> Answer:
    """The result of the sizing guide's thirteen steps for a workload profile."""
    # Lazy: slow to import, and most sizes have no profile.
    from kneewatch.diagnose.sizing.plan.plan_result import (
        plan_document,
        plan_lines,
        plan_summary,
        settings_lines,
    )
    from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
    from kneewatch.diagnose.sizing.plan.workload_profile import read_profile

    path = given["plan"]
    if not path:
        raise SizingError("--format toml is the settings of a plan: name its profile", name="plan")
    text = profile_text(path, "plan")
    refuse_ignored_by_plan(given)
    profile = read_profile(text, origin=path, stated=over_profile(given))
    folder = Path(path).parent
    texts = {name: text_of(str(folder / name), "plan") for name in profile.benchmark_files}
    models = {name: named_model(name) for name in profile.models}
    result = plan(profile, models=models, benchmarks=texts)
    members = {"plan": plan_document(result)}
    summary = (*plan_summary(result), "The thirteen steps with their arithmetic: --explain")
    written = settings_lines(result, path=str(Path(path).absolute())) if form == "toml" else ()
    return Answer(None, members, plan_lines(result), result.fits, summary, settings=written)


def error_text(error: SizingError) -> str:
    """The error as text, with the name of the flag and the valid choices."""
    flag = _BY_INPUT.get(error.name, "--" + error.name.replace("_", "-"))
    # A switch takes no value.
    listed = () if error.name == "hybrid_pool" else error.choices
    choices = f"; choices: {', '.join(listed)}" if listed else ""
    return f"{flag}: {error}{choices}"


# --- A whole vLLM command line as the question ----------------------------------------------------


# In front of a GPU, not within its name (mi300x).
_COUNTED = re.compile(r"^\s*(\d+)\s*x\s*(?=\S)", re.IGNORECASE)
# Of long lists, those spelled most like the value are named.
_MOST_CHOICES = 8
_NO_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix", "medusa")


def with_words(given: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The flags with the words behind them: a vLLM command line, quoted or not, or a model's id.

    A GPU may follow the model, and its number may be in front of it: `MODEL on 8xh200`.
    """
    text = words[0] if len(words) == 1 else shlex.join(words)
    model, _, rest = text.partition(" ")
    rest = rest.strip().removeprefix("on ")
    stated: dict[str, str] = {"launch" if rest else "model": text} if text else {}
    with suppress(SizingError):
        if rest and named_gpu(_COUNTED.sub("", rest)):
            stated = {"model": model, "gpu": rest}
    given = given | stated
    counted = _COUNTED.match(given["gpu"] or "")
    if counted is None or given["gpus"] is not None:
        return given
    return given | {"gpus": int(counted[1]), "gpu": _COUNTED.sub("", given["gpu"])}


def with_launch(given: dict[str, Any]) -> dict[str, Any]:
    """The flags with those of the vLLM command line `launch`; a flag of `size` goes before.

    Raises:
        SizingError: the text has no vLLM command.
    """
    if given["launch"] is None:
        return given
    text = _listed(given["launch"])
    kind = next((each for each in engine_kinds() if _launcher(each, text)), None)
    if kind is not None and not kind.slack:
        knows = " and ".join(each.title for each in sized_kinds())
        why = f"it starts {kind.title}, and size knows {knows} only. {kind.memory}"
        raise SizingError(why, name="launch")
    if kind is not None:
        text = _as_vllms(kind, text)
        given = given | {"engine": given["engine"] or kind.title}
    try:
        launch = parse_command(text, origin="the command line")
    except SettingsError as error:
        raise SizingError(f"{error}, or `MODEL 8xh200`", name="launch") from error
    stated = command_values(launch)
    stated |= _speculation(launch)
    stated["model"] = launch.model or None
    others = {flag: text for flag, text in _others(launch).items() if flag not in launch.cut}
    versions = (image_version(word) for line in commands(text) for word in line)
    stated["vllm_version"] = next((version for version in versions if version), None)
    named = given["vllm_version"] or stated["vllm_version"]
    version = parse_version(named) if named else LATEST
    gone = [flag for flag in others if is_dropped(flag, version)]
    others = {flag: text for flag, text in others.items() if flag not in gone}
    drafting = tuple((flag, text) for flag, text in launch.flags.items() if _drafts(flag))
    given = given | {"ignored": ignored_flags(launch), "other_flags": tuple(others.items())}
    given["drafting"] = drafting
    given["auto_context"] = launch.text(LONGEST_TOKENS) in ("auto", "-1") or None
    if kind is None:
        _refuse_unreadable(launch)
    settled = [f"vLLM has no {flag} any more and refuses it: not in run" for flag in gone]
    settled += [
        f"vLLM reads no {name} any more"
        + (f": use {UNREAD_VARIABLES[name]}" * bool(UNREAD_VARIABLES[name]))
        for name in launch.environment
        if name in UNREAD_VARIABLES and version >= UNREAD_SINCE
    ]
    settled += [
        f"{earlier} and {later} are given: vLLM takes the last"
        for earlier, later in launch.overridden
        if later.split(" ")[0].split(".")[0].replace("--no-", "--", 1) in VLLM
    ]
    taken = dict[str, Any]()
    for flag in FLAGS:
        name = flag.parameter
        value = stated.get(name)
        if value is not None and given[name] == flag.default:
            taken[name] = value
        elif value not in (None, given[name]):
            theirs = f"{flag.launch or flag.name} {flag.text(value)}".strip()
            settled += [f"{flag.name} {given[name]} goes before {theirs} of the command line"]
    return given | taken | {"settled": tuple(settled)}


def _refuse_unreadable(launch: CommandLine) -> None:
    for name, flag in VLLM.items():
        text = launch.text(name)
        # Templates of a manifest say nothing; -1 is like auto, the longest context that fits.
        if text is None or text.startswith("{{") or (name, text) == (LONGEST_TOKENS, "-1"):
            continue
        is_number = flag.kind in ("count", "number", "gib")
        choices, document = flag.choices.split(), _json(text if text.startswith("{") else "{}")
        if f"{name}-plugin" in launch.flags:
            choices = []
        lacking = [key for key in flag.keys if key not in (document or {})]
        members = flag.members.split()
        strange = [key for key in document or {} if members and key not in members]
        least = launch.number(flag.least) if isinstance(flag.least, str) else flag.least
        groups = [{*group.split()} for group in flag.needs.split("&") if group]
        needs = next((group for group in groups if not launch.flags.keys() & group), ())
        with_it = launch.flags.keys() & {flag.excludes}
        why = ""
        if (
            (is_number and launch.unreadable(name))
            or (choices and text.lower() not in choices)
            or document is None
            or (least is not None and _number(text, least) < least)
        ):
            why = repr(text)
        elif strange:
            why, choices = f"the key {strange[0]!r}", members
        elif launch.complete and (lacking or needs):
            why = f"it without {' and '.join(lacking) or ' or '.join(sorted(needs))}"
        elif with_it:
            why = f"it beside {flag.excludes}"
        if len(choices) > _MOST_CHOICES:
            choices = difflib.get_close_matches(text.lower(), choices, _MOST_CHOICES, cutoff=0.0)
        if why:
            raise SizingError(f"vLLM refuses {why}", name=flag.parameter, choices=choices)


def _number(text: str, default: float) -> float:
    with suppress(ValueError):
        return float(text)
    return default


def _json(text: str) -> Mapping[str, object] | None:
    """The JSON object; None if it is none."""
    with suppress(ValueError):
        return mapping(orjson.loads(text))
    return None


def _listed(text: str) -> str:
    """The command lines of the containers in YAML or JSON; other text as it is."""
    with suppress(ValueError, RecursionError):
        return "\n".join(_scripts(yaml_document(text))) or text
    return text


def _scripts(document: object) -> Iterator[str]:
    """What the containers of a manifest, or a list of arguments, may run."""
    fields = mapping(document) or {}
    parts = list(fields.values()) or _items(document)
    given = [fields.get(key) for key in _RUN] if fields else [parts]
    words = [word for each in given for word in _words(each)]
    if any("--" in word for word in words):
        image, variables = fields.get("image"), list(_variables(fields))
        stated = [f"--env={pair}" for pair in variables]
        before = ("docker", "run", *stated, str(image)) if image else variables
        yield shlex.join([*before, *words])
        yield from (word for word in words if " " in word)  # what a shell runs (sh -c)
    else:
        yield from chain.from_iterable(map(_scripts, parts))


def _variables(fields: Mapping[str, object]) -> Iterator[str]:
    """NAME=VALUE of a container's variables (Kubernetes, Compose)."""
    listed = fields.get("env") or fields.get("environment")
    for name, value in (mapping(listed) or {}).items():
        yield f"{name}={value}"
    for each in _items(listed):
        entry = mapping(each)
        if entry is None:
            yield str(each)
        elif "value" in entry:
            yield f"{entry.get('name')}={entry['value']}"


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    return [str(each) for each in _items(value) if not isinstance(each, list | dict)]


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _launcher(kind: EngineKind, text: str) -> str:
    """The words of a command line that start the engine; empty if they are not there."""
    return next((launcher for launcher in kind.launchers if launcher in text), "")


def _as_vllms(kind: EngineKind, text: str) -> str:
    """A command line of another engine with vLLM's flags; a flag that is not spelled is kept."""
    theirs = {own: flag for flag, own in kind.flags.items() if flag != SPECULATION}
    model, words = "", list[str]()
    rest = iter(shlex.split(text.partition(_launcher(kind, text))[2].replace("\\\n", " ")))
    for word in rest:
        flag, is_joined, value = word.partition("=")
        if flag in ("--model-path", "--model"):
            model = value if is_joined else next(rest, "")
        else:
            words += [theirs.get(flag) or theirs.get(f"{flag}-size", flag)]
            words += [value] if is_joined else []
    return shlex.join(["vllm", "serve", *([model] if model else []), *words])


def ignored_flags(launch: CommandLine) -> tuple[str, ...]:
    """The flags of a command line that are not counted and may matter, and what they may change."""
    listed = list[str]()
    for flag in _others(launch):
        name = flag.split(".")[0]
        effect = effect_of(name)
        listed += [f"{name} ({effect})"] if effect not in ("", UNKNOWN) else []
    lines = [
        "flags of the command line that are not counted",
        "flags with several values, not in run",
    ]
    return tuple(
        f"{line}: {', '.join(dict.fromkeys(flags))}"
        for line, flags in zip(lines, (listed, launch.cut), strict=True)
        if flags
    )


def _others(launch: CommandLine) -> Mapping[str, str]:
    """The flags and variables of a command line that do not count, with their values."""
    counted = {flag.launch for flag in FLAGS} | {ADAPTERS}
    counts_draft = bool(_speculation(launch))
    return dict(launch.environment) | {
        flag: value
        for flag, value in launch.flags.items()
        if flag.split(".")[0] not in counted and not (counts_draft and _drafts(flag))
    }


_SPECULATION_KEYS = {"--spec-method": "method", "--spec-model": "model"}


def _drafts(flag: str) -> bool:
    return flag.split(".")[0] in (SPECULATION, "--spec-tokens", *_SPECULATION_KEYS)


def _speculation(launch: CommandLine) -> dict[str, Any]:
    config = dict(launch.document(SPECULATION))
    config |= {key: text for flag, key in _SPECULATION_KEYS.items() if (text := launch.text(flag))}
    if stated := launch.count("--spec-tokens"):
        config["num_speculative_tokens"] = stated
    method, tokens = str(config.get("method") or ""), config.get("num_speculative_tokens")
    if method in _NO_DRAFT_MODEL and tokens is None:
        why = f"{method} without num_speculative_tokens"
        raise SizingError(f"vLLM refuses {why}", name="num_speculative_tokens")
    if not method and tokens is not None and not config.get("model"):
        why = "vLLM refuses num_speculative_tokens without a draft model or a method"
        raise SizingError(why, name="draft_model")
    if not isinstance(tokens, int) or method in _NO_DRAFT_MODEL:
        return {}
    drafts = "mtp" if method.endswith("mtp") else config.get("model")
    return {"draft_model": drafts, "num_speculative_tokens": tokens} if drafts else {}
