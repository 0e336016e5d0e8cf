"""Facts about the deployment from the settings: model, GPU, workload, benchmarks. I/O edge."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kneewatch.agent.settings.effective import Settings, gathered, reported_together
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.files import read_file, read_text
from kneewatch.diagnose.catalogue.gpu_specs import Gpu, gpu, recognise
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model, is_listed, model, model_from_config
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import COUNTS, VLLM, CommandLine, parse_command
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark
from kneewatch.diagnose.sizing.benchmark.operating_point import Sweeps
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.launch import Launch, parse_version

if TYPE_CHECKING:
    from kneewatch.diagnose.lengths import StatedWorkload
    from kneewatch.diagnose.sizing.plan.workload_profile import WorkloadProfile


@contextmanager
def named_by(settings: Settings, key: str, what: str = "") -> Generator[None]:
    """A context for using the value of a setting. It adds the origin of the setting to the message
    of an error."""
    try:
        yield
    except (SettingsError, SizingError) as exc:
        choices = exc.choices if key == "model" and isinstance(exc, SizingError) else ()
        near = f"; near: {', '.join(choices)}" if choices else ""
        raise SettingsError(f"{settings.origin(key)}: {what}{exc}{near}") from exc


# --- Files that a user names: model configuration, workload profile, benchmark --------------------


CONFIG = "config.json"
CONFIG_MAX_BYTES = 8 * 1024 * 1024
TEXT_MAX_BYTES = 4 * 1024 * 1024


def named_gpu(name: str) -> Gpu:
    """The GPU of the catalogue with this id, or with this name reported by the driver.

    Raises:
        SizingError: the catalogue has no such GPU.
    """
    return recognise(name) or gpu(name)


def named_model(name: str) -> Model:
    """The model with this name: a path, a catalogue id, or an id in the local Hugging Face cache.

    Raises:
        SizingError: the name is none of these, or the model's configuration is unusable.
    """
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            path = path / CONFIG
        if path.is_file():
            return model_from_config(str(path), _document(path))
    except OSError as exc:
        raise SizingError(f"{name[:200]}: {exc.strerror}", name="model") from exc
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        return _named_by_path(path)
    # A configuration of the user's own goes before an entry of the same architecture.
    cached = None if is_listed(name) else _cached(name)
    return model(name) if cached is None else model_from_config(name, _document(cached))


def _named_by_path(path: Path) -> Model:
    """The model that a path of another machine is named after."""
    try:
        named = model(path.name)
    except SizingError as error:
        raise SizingError(f"{path} does not exist", name="model", choices=error.choices) from error
    return replace(named, notes=(*named.notes, f"{path} is not on this machine: sized by its name"))


def _cached(name: str) -> Path | None:
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = hub / ("models--" + name.replace("/", "--")) / "snapshots"
    if "/" not in name or not folder.is_dir():
        return None
    configs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    return configs[-1] if configs else None


def _document(path: Path) -> object:
    try:
        return json.loads(read_file(path, CONFIG_MAX_BYTES))
    except OSError as exc:
        raise SizingError(f"{path} cannot be read: {exc.strerror}", name="model") from exc
    except (ValueError, RecursionError) as exc:
        raise SizingError(f"{path} is not JSON: {exc}", name="model") from exc


def profile_text(path: str, name: str) -> str:
    """The text of a workload profile. The path `example` stands for the shipped profile.

    Raises:
        SizingError: as in `text_of`.
    """
    from kneewatch.diagnose.sizing.plan.workload_profile import example_profile

    return example_profile() if path == "example" else text_of(path, name)


def text_of(path: str, name: str) -> str:
    """The contents of a text file.

    Raises:
        SizingError: the file is missing, too large, unreadable or not text.
    """
    try:
        return read_text(path, TEXT_MAX_BYTES)
    except OSError as exc:
        missing = isinstance(exc, FileNotFoundError)
        reason = "does not exist" if missing else f"cannot be read: {exc.strerror}"
        raise SizingError(f"{path[:200]} {reason}", name=name) from exc
    except UnicodeDecodeError as exc:
        raise SizingError(f"{path} is not a text file", name=name) from exc


# --- What the settings state of a deployment ------------------------------------------------------


PROFILE_SETTING = "workload_profile"


def stated_workload(settings: Settings) -> StatedWorkload | None:
    """The expected workload, with which live requests are compared. None if the settings name no
    profile.

    Raises:
        SettingsError: as in `named_profile`.
    """
    profile = named_profile(settings)
    if profile is None:
        return None
    from kneewatch.diagnose.sizing.plan.plan_result import watched

    return watched(profile, origin=Path(settings[PROFILE_SETTING]).name)


def named_profile(settings: Settings, key: str = PROFILE_SETTING) -> WorkloadProfile | None:
    """The workload profile that a setting names, read as by `size --plan`. None if the setting is
    not set.

    Raises:
        SettingsError: the file is unreadable or invalid; the message has the setting's origin, the
            file and the key.
    """
    path: str | None = settings[key]
    if path is None:
        return None
    # Lazy: slow to import, and most daemons have no profile.
    from kneewatch.diagnose.sizing.plan.workload_profile import read_profile

    with named_by(settings, key):
        return read_profile(profile_text(path, key), origin=path)


# --- Benchmark sweeps by tensor-parallel degree ---------------------------------------------------


SWEEPS_SETTING = "benchmark.by_tensor_parallel"
MAX_DEGREE = 1024
MAX_FILES = 256
"""Maximum number of files per tensor-parallel degree. A sweep has a few dozen loads."""


def stated_sweeps(settings: Settings) -> Sweeps:
    """The benchmark sweeps that the settings name, by tensor-parallel degree.

    Raises:
        SettingsError: as in `sweeps_of`, with the setting's origin.
    """
    named: Mapping[str, str] | None = settings[SWEEPS_SETTING]
    if not named:
        return {}
    with named_by(settings, SWEEPS_SETTING, f"{SWEEPS_SETTING}: "):
        return sweeps_of(named.items())


def sweeps_of(named: Iterable[tuple[str, str]]) -> Sweeps:
    """Read benchmark sweeps, given as pairs of tensor-parallel degree and path.

    A path may be a pattern such as `tp4/*.json`, because most tools write one file per load.

    Raises:
        SizingError: a degree is invalid, or a file cannot be used; the message names both.
    """
    sweeps: dict[int, Benchmark] = {}
    for text, path in named:
        degree = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= degree <= MAX_DEGREE or degree in sweeps:
            problem = "is named twice" if degree in sweeps else "is not a tensor-parallel degree"
            raise _sweeps_error(f"{text!r} {problem}; write 4 = FILE")
        try:
            sweeps[degree] = _sweep(path)
        except SizingError as exc:
            raise _sweeps_error(f"TP {degree}: {exc}") from exc
    return sweeps


def _sweep(path: str) -> Benchmark:
    # Lazy: slow to import, and most commands have no benchmark.
    from kneewatch.diagnose.sizing.benchmark.reports import merged, read_benchmark

    benchmarks: list[Benchmark] = []
    for file in _files(path):
        text = text_of(file, "benchmark")
        try:
            benchmarks.append(read_benchmark(text))
        except SizingError as exc:
            raise _sweeps_error(f"{file}: {exc}") from exc
    return merged(benchmarks)


def _files(path: str) -> list[str]:
    if not has_magic(path) or Path(path).exists():
        return [path]
    files = sorted(glob(path))  # noqa: PTH207 - a pattern may be absolute
    if not files or len(files) > MAX_FILES:
        raise _sweeps_error(f"{path} matches {len(files)} files: 1 to {MAX_FILES} are allowed")
    return files


def _sweeps_error(message: str) -> SizingError:
    return SizingError(message, name="benchmark_by_tensor_parallel")


# --- Model, GPU and launch command ----------------------------------------------------------------


def stated(settings: Settings) -> Stated:
    """The deployment according to the settings: model, GPU, launch flags, workload, benchmarks.

    Raises:
        SettingsError: a model, GPU or version is unknown, or a file cannot be read; a message for
            each mistake names the setting, its origin and the choices.
    """
    launch = gpu = version = model = workload = None
    flags: Mapping[str, str] = {}
    sweeps: Sweeps = {}
    with reported_together() as mistakes:
        with gathered(mistakes):
            launch = _launch(settings)
        with gathered(mistakes), named_by(settings, "launch_flags"):
            flags = _flags(settings["launch_flags"] or {})
        with gathered(mistakes), named_by(settings, "gpu"):
            gpu = named_gpu(settings["gpu"]) if settings["gpu"] is not None else None
        with gathered(mistakes), named_by(settings, "vllm_version"):
            written = settings["vllm_version"]
            version = None if written is None else parse_version(written)
        with gathered(mistakes):
            model = _model(settings, launch)
        with gathered(mistakes):
            workload = stated_workload(settings)
        with gathered(mistakes):
            sweeps = stated_sweeps(settings)
    deployment = Stated(
        model=model,
        gpu=gpu,
        tensor_parallel=settings["tensor_parallel"],
        version=version,
        command_line=launch,
        flags=flags,
        replicas=settings["replicas"],
        usd_per_gpu_hour=settings["usd_per_gpu_hour"],
        gpus=settings["gpus"],
        workload=workload,
        sweeps=sweeps,
    )
    _check_layout(settings, deployment)
    return deployment


def _check_layout(settings: Settings, deployment: Stated) -> None:
    """Check that the model can be split over the number of GPUs in the settings."""
    if deployment.model is None or deployment.degree is None:
        return
    key = "tensor_parallel" if deployment.tensor_parallel else "launch_file"
    launch = Launch(model=deployment.model, gpu=deployment.gpu, parallel=deployment.parallel)
    with named_by(settings, key):
        kv_layout_of(launch)


def _launch(settings: Settings) -> CommandLine | None:
    path = settings["launch_file"]
    if path is None:
        return None
    origin = f"{settings.origin('launch_file')}: launch_file {path}"
    with named_by(settings, "launch_file", "launch_file "):
        text = text_of(path, "launch_file")
    launch = parse_command(text, origin=origin)
    _check_counts(launch, origin)
    return launch


def _flags(stated: Mapping[str, str]) -> Mapping[str, str]:
    """The stated flags, by vLLM's names.

    Raises:
        SettingsError: vLLM has no such flag, or it requires another value.
    """
    words = [f"--{name.removeprefix('--')}={value}" for name, value in stated.items()]
    launch = parse_command(shlex.join(words), origin="launch_flags") if words else CommandLine()
    for flag in launch.flags:
        if flag.partition(".")[0] not in VLLM:
            raise SettingsError(f"{flag} is no flag of vLLM that kneewatch knows")
    _check_counts(launch, "launch_flags")
    return launch.flags


def _check_counts(launch: CommandLine, origin: str) -> None:
    for flag in COUNTS:
        if launch.number(flag) == 0 and flag != "--long-prefill-token-threshold":
            raise SettingsError(f"{origin}: {flag} is 0; vLLM requires 1 or more")


def _model(settings: Settings, launch: CommandLine | None) -> Model | None:
    name = settings["model"]
    if name is not None:
        with named_by(settings, "model"):
            return named_model(name)
    # The model of the launch command may be unknown: recommendations stay relative then.
    with suppress(SizingError):
        return named_model(launch.model) if launch is not None and launch.model else None
    return None
