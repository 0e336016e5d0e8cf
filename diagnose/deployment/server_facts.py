"""Facts about a server, merged from several sources. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS, TENSOR_SPLIT
from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpus, recognise
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model, known_model
from kneewatch.diagnose.deployment.deployment import KV_SIZE_LABEL, Reported, Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import (
    SHOWN,
    VLLM,
    CommandLine,
    Version,
    oldest_version,
    parameter_of,
)
from kneewatch.diagnose.sizing.launch_notes import hardware_notes
from kneewatch.diagnose.sizing.memory.launch import parse_version
from kneewatch.diagnose.verdict import KnownFact, Server, UnknownFact, Value

SETTING, PAGE, SERVER, PROCESS, POD, LOG, GPUS, CONFIG_FILE = SOURCES = (
    "setting",
    "page",
    "server",
    "process",
    "pod",
    "log",
    "gpus",
    "config.json",
)
"""Sources of facts; earlier ones override later ones."""

VERSION, MODEL, MODEL_PATH, TENSOR_PARALLEL = (
    "vllm_version",
    "model",
    "model_path",
    "tensor_parallel",
)
MAX_MODEL_LEN, KV_BLOCKS, KV_TOKENS = "max_model_len", "num_gpu_blocks", KV_SIZE_LABEL
WEIGHTS_GIB, AVAILABLE_KV_GIB = "weights_gib", "available_kv_gib"
GPU, SERVER_GPUS, GPU_UUIDS = "gpu", "server_gpus", "gpu_uuids"
"""Names of facts that the sizing uses. For flags, the fact's name is the flag's with
underscores."""

DEGREES_MAX = 1024
TEXT_MAX_CHARS = 300

LAUNCH_FACTS = frozenset(
    {
        *(VERSION, MODEL_PATH, TENSOR_PARALLEL, MAX_MODEL_LEN),
        *(parameter_of(flag) for flag in SHOWN - {"--port"}),
    }
)
"""Facts that only another launch changes."""

LABELS = {
    "block_size": "block_size",
    KV_BLOCKS: "num_gpu_blocks",
    KV_TOKENS: KV_SIZE_LABEL,
    **{
        flag.parameter: flag.label
        for flag in VLLM.values()
        if flag.label and flag.sets is not False
    },
}
"""For each fact, the label of cache_config_info that contains it."""

ADJUSTED = frozenset({"block_size", "enable_prefix_caching"})
"""vLLM itself changes these values for some models: a difference does not make the launch
doubtful."""

SUPPLY = {
    MODEL: "set model (--model): a catalogue id or the path of its config.json",
    GPU: "set gpu (--gpu): a catalogue id or the driver's name of the GPU",
    TENSOR_PARALLEL: "set tensor_parallel (--tp)",
    VERSION: "set vllm_version (--vllm-version)",
    "launch": "set launch_file (--launch-file) to a file with the server's command line",
    "replicas": "set replicas (--replicas): servers behind the same load balancer",
}
"""How the user can supply each fact that the recommendations need."""


class SourceReading(Struct, frozen=True):
    """What one source reports about a server at `read_s`.

    `model` is the model of a configuration file. `notes` say
    what could not be read, and how to allow it.
    """

    source: str
    read_s: float
    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    command_line: CommandLine | None = None
    model: Model | None = None
    notes: tuple[str, ...] = ()


def merge(
    stated: Stated,
    readings: Iterable[SourceReading],
    *,
    config: Mapping[str, str],
    model_names: Collection[str],
    settings_s: float,
    page_s: float,
) -> tuple[Server, Stated]:
    """The facts of all sources, and `stated` completed with them for the recommendations.

    `config` (the labels of cache_config_info) and `model_names` (the served models) are from the
    page that was read at `page_s`. `settings_s` is when the settings were read.

    A setting overrides every other source. A value that contradicts the page is dropped. If the
    value is from a log, the whole log is dropped: it belongs to another start. Each such case adds
    a note with both values.
    """
    ordered = sorted(readings, key=lambda reading: SOURCES.index(reading.source))
    notes = [note for reading in ordered for note in reading.notes]
    page = {fact.name: fact for fact in _page_facts(config, model_names, page_s)}
    of_another_start = [
        (reading, problem)
        for reading in ordered
        if reading.source == LOG and (problem := _other_start(reading, page, config, ordered))
    ]
    for reading, problem in of_another_start:
        ordered.remove(reading)
        notes.append(f"the log is from another start of the server and is ignored: {problem}")
    command_line = next(filter(None, (reading.command_line for reading in ordered)), None)
    chosen = {fact.name: fact for fact in (*_stated_facts(stated, settings_s), *page.values())}
    for fact in _facts_of(ordered, model_names):
        seen = page.get(fact.name)
        problem = _page_problem(fact, config)
        if problem or (seen is not None and not _same(seen.value, fact.value)):
            why = problem or f"the page has {_shown(seen.value if seen else '')}"
            notes.append(
                f"{fact.name}: {_shown(fact.value)} from {fact.source} is ignored, because {why}"
            )
            command_line = None if command_line is None else _without(command_line, fact.name)
            continue
        first = chosen.setdefault(fact.name, fact)
        if not _same(first.value, fact.value):
            notes.append(
                f"{fact.name}: {_shown(first.value)} from {first.source} is used, not "
                f"{_shown(fact.value)} from {fact.source}"
            )
    if SERVER_GPUS in chosen and chosen[SERVER_GPUS].value == 1:
        # One GPU is not split, whatever else is unknown.
        only = chosen[SERVER_GPUS]
        chosen.setdefault(TENSOR_PARALLEL, replace(only, name=TENSOR_PARALLEL))
    completed = _completed(stated, chosen, command_line, ordered)
    notes += _uncounted(completed, chosen.get(SERVER_GPUS))
    try:
        launch = deployment(config, completed).sized_launch
        notes += () if launch is None else hardware_notes(launch)
    except SizingError as exc:
        notes.append(f"the facts found cannot be sized, so only the settings are used: {exc}")
        completed = stated
    facts = tuple(sorted(chosen.values(), key=lambda fact: SOURCES.index(fact.source)))
    of_launch = {fact.name: fact.value for fact in facts if fact.name in LAUNCH_FACTS}
    return Server(facts, tuple(dict.fromkeys(notes)), _unknown(completed), of_launch), completed


def models_reading(models: Sequence[str], read_s: float) -> SourceReading:
    """Facts from the product names of a server's GPUs, one name per GPU.

    The facts are the number of GPUs and, if all are alike, their model.
    """
    values: dict[str, Value] = {SERVER_GPUS: len(models)} if models else {}
    if len(set(models)) == 1:
        name = models[0]
        spec = recognise(name)
        values |= {"gpu_name": printable(name)} if name else {}
        values |= {} if spec is None else {GPU: spec.id}
    return SourceReading(GPUS, read_s, values)


def _uncounted(stated: Stated, counted: KnownFact | None) -> list[str]:
    """A note if the server uses another number of GPUs than its command line requests; else
    empty."""
    requested = stated.server_gpus
    if counted is None or requested is None or counted.value == requested:
        return []
    return [
        f"the server uses {counted.value} GPUs of this node, but its command line or the settings "
        f"ask for {requested}"
    ]


def _other_start(
    reading: SourceReading,
    page: Mapping[str, KnownFact],
    config: Mapping[str, str],
    readings: Sequence[SourceReading],
) -> str:
    """The evidence that a log is from another process than the running one; empty if there is
    none."""
    answered = {
        name: KnownFact(name, other.values[name], SERVER, read_s=other.read_s)
        for other in readings
        if other.source == SERVER
        for name in (VERSION, MAX_MODEL_LEN)
        if name in other.values
    }
    for fact in _facts_of((reading,), ()):
        seen = page.get(fact.name) or answered.get(fact.name)
        if fact.name in ADJUSTED:
            continue
        if problem := _page_problem(fact, config):
            return f"it has {fact.name} {_shown(fact.value)}, {problem}"
        if seen is not None and not _same(seen.value, fact.value):
            return (
                f"it has {fact.name} {_shown(fact.value)}, the {seen.source} has "
                f"{_shown(seen.value)}"
            )
    return ""


def _stated_facts(stated: Stated, read_s: float) -> Iterable[KnownFact]:
    values: dict[str, Value | None] = {
        MODEL: stated.model.id if stated.model else None,
        GPU: stated.gpu.id if stated.gpu else None,
        VERSION: version_text(stated.version) if stated.version else None,
        "replicas": stated.replicas,
        "gpus": stated.gpus,
        "usd_per_gpu_hour": stated.usd_per_gpu_hour,
    }
    values |= launch_values(stated.command)
    if stated.tensor_parallel is not None:
        values[TENSOR_PARALLEL] = stated.tensor_parallel
    return [
        KnownFact(name, value, SETTING, read_s=read_s)
        for name, value in values.items()
        if value is not None
    ]


def _page_facts(
    config: Mapping[str, str], model_names: Collection[str], read_s: float
) -> Iterable[KnownFact]:
    texts = {name: config.get(label, "") for name, label in LABELS.items()}
    values = {name: text for name, text in texts.items() if text not in ("", "None", "null")}
    if model_names:
        values["served_model_name"] = " ".join(sorted(model_names))
    return [KnownFact(name, typed(text), PAGE, read_s=read_s) for name, text in values.items()]


def _facts_of(
    readings: Sequence[SourceReading], model_names: Collection[str]
) -> Iterable[KnownFact]:
    for reading in readings:
        values = dict(reading.values)
        if reading.command_line is not None:
            values |= launch_values(reading.command_line)
        values.pop("served_model_name", None)
        served = reading.model or _catalogued(values.get(MODEL_PATH), model_names)
        if served is not None:
            values[MODEL] = served.id
        for name, value in values.items():
            yield KnownFact(name, value, reading.source, read_s=reading.read_s)


def launch_values(launch: CommandLine) -> dict[str, Value]:
    """The facts of a command line, by name. Flags that could contain a secret are left out.

    If the whole command line is known and has no tensor-parallel size, the size is 1.
    """
    values: dict[str, Value] = {}
    for flag in launch.flags:
        name = parameter_of(flag)
        text = launch.text(flag)
        if flag not in SHOWN or text is None:
            continue
        if name.startswith("no_"):
            values[name.removeprefix("no_")] = False
        elif flag == TENSOR_SPLIT:
            degree = launch.count(flag)
            if degree is not None and 1 <= degree <= DEGREES_MAX:
                values[TENSOR_PARALLEL] = degree
        elif flag == LONGEST_TOKENS:
            length = launch.count(flag)
            values |= {} if length is None else {MAX_MODEL_LEN: length}
        else:
            values[name] = typed(text[:TEXT_MAX_CHARS]) if text else True
    if launch.absent(TENSOR_SPLIT):
        values[TENSOR_PARALLEL] = 1
    if launch.model:
        values[MODEL_PATH] = launch.model[:TEXT_MAX_CHARS]
    return values


def typed(text: str) -> Value:
    """A value as a boolean or number if its text is one; otherwise the text."""
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        try:
            return kind(text) if len(text) < 20 else text
        except ValueError:
            continue
    return text


def _catalogued(path: Value | None, model_names: Collection[str]) -> Model | None:
    """The catalogue's model with this id; None for a path, or if the page has several models."""
    return known_model(path) if isinstance(path, str) and len(model_names) <= 1 else None


def _page_problem(fact: KnownFact, config: Mapping[str, str]) -> str:
    """Why a fact contradicts the page; empty if it does not."""
    if fact.name != VERSION:
        return ""
    version, oldest = version_of(fact.value), oldest_version(config)
    if version is None or oldest is None or version >= oldest:
        return ""
    return f"the page has labels of {version_text(oldest)} or later"


def _same(first: Value | None, second: Value | None) -> bool:
    if first == second:
        return True
    texts = {str(first), str(second)}
    return "auto" in texts or texts == {"fp8", "fp8_e4m3"}


def _without(launch: CommandLine, name: str) -> CommandLine:
    flag = name.replace("_", "-")
    gone = {f"--{flag}", f"--no-{flag}"} & launch.flags.keys()
    flags = {key: value for key, value in launch.flags.items() if key not in gone}
    return replace(launch, flags=flags, complete=launch.complete and (not gone or name in ADJUSTED))


def _completed(
    stated: Stated,
    chosen: Mapping[str, KnownFact],
    launch: CommandLine | None,
    readings: Sequence[SourceReading],
) -> Stated:
    """The settings, with those that the user left unset filled in from the facts."""
    degree, gpu_fact = chosen.get(TENSOR_PARALLEL), chosen.get(GPU)
    length = chosen.get(MAX_MODEL_LEN)
    tokens = chosen.get(KV_TOKENS)
    version = chosen.get(VERSION)
    return replace(
        stated,
        model=stated.model or _model_of(chosen.get(MODEL), readings),
        gpu=stated.gpu or (gpus().get(str(gpu_fact.value)) if gpu_fact else None),
        tensor_parallel=stated.degree or (_count(degree.value) if degree else None),
        version=stated.version or (version_of(version.value) if version else None),
        command_line=stated.command_line or launch,
        reported=Reported(
            max_model_len=_count(length.value) if length else None,
            weights_bytes=_bytes(chosen.get(WEIGHTS_GIB)),
            available_kv_bytes=_bytes(chosen.get(AVAILABLE_KV_GIB)),
            # The page's own figure is read with its blocks, which may contradict it.
            kv_cache_tokens=_number(tokens) if tokens and tokens.source != PAGE else None,
            start_s=_start_s(chosen),
            in_pod=any(fact.source == POD for fact in chosen.values()),
        ),
    )


def _start_s(chosen: Mapping[str, KnownFact]) -> float | None:
    """Seconds of the logged parts of the last start; None if its load is not logged."""
    load_s, graph_s = _number(chosen.get("load_s")), _number(chosen.get("graph_s"))
    return None if load_s is None else load_s + (graph_s or 0.0)


def _model_of(fact: KnownFact | None, readings: Sequence[SourceReading]) -> Model | None:
    if fact is None:
        return None
    read = [reading.model for reading in readings if reading.source == fact.source]
    return read[0] if read and read[0] is not None else _catalogued(fact.value, ())


def _count(value: Value | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(fact: KnownFact | None) -> float | None:
    value = None if fact is None else fact.value
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if numeric and isinstance(value, int | float) else None


def _bytes(fact: KnownFact | None) -> float | None:
    gib = _number(fact)
    return None if gib is None else gib * GIB


def version_of(value: Value | None) -> Version | None:
    """The version in a fact's value; None if the value is not a version."""
    try:
        return parse_version(str(value))
    except SizingError:
        return None


def printable(text: str) -> str:
    """The first `TEXT_MAX_CHARS` characters, with ? for characters that cannot be printed."""
    return "".join(char if char.isprintable() else "?" for char in text[:TEXT_MAX_CHARS])


def version_text(version: Version) -> str:
    """A version as 0.32.0."""
    return ".".join(map(str, version))


def _unknown(stated: Stated) -> tuple[UnknownFact, ...]:
    others = {
        VERSION: stated.version,
        "launch": stated.command_line,
        "replicas": stated.replicas,
    }
    unknown = [*stated.lacking, *(name for name, value in others.items() if value is None)]
    return tuple(UnknownFact(name, SUPPLY[name]) for name in unknown)


def _shown(value: Value | None) -> str:
    return str(value)[:TEXT_MAX_CHARS]
