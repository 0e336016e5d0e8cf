"""What the settings state about the served deployment: model, GPU, command line. I/O edge."""

from __future__ import annotations

from pathlib import Path

from kneewatch.agent.benchmarks import stated_sweeps
from kneewatch.agent.model_files import named_model
from kneewatch.agent.settings import Settings
from kneewatch.agent.workload_file import stated_workload
from kneewatch.collector.base import SettingsError
from kneewatch.diagnose.catalogue.gpus import Gpu, gpu, recognise
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.recommend.deployment import Stated, stated_version
from kneewatch.diagnose.recommend.launch import NUMBERS, Launch, parse_launch
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.weights import Parallel

LARGEST_BYTES = 1024 * 1024


def stated(settings: Settings) -> Stated:
    """What the recommendations may take as known.

    Raises:
        SettingsError: a model, GPU or version that is not known, or a file that cannot be read;
            it names the setting, where its value came from, and the choices.
    """
    launch = _launch(settings)
    made = Stated(
        model=_model(settings, launch),
        gpu=_gpu(settings),
        tensor_parallel=settings["tensor_parallel"],
        version=_version(settings),
        launch=launch,
        replicas=settings["replicas"],
        usd_per_gpu_hour=settings["usd_per_gpu_hour"],
        gpus=settings["gpus"],
        workload=stated_workload(settings),
        sweeps=stated_sweeps(settings),
    )
    _check_layout(settings, made)
    return made


def _check_layout(settings: Settings, made: Stated) -> None:
    """That the stated model can be split over so many GPUs."""
    launch = made.launch or Launch()
    tensor = made.tensor_parallel or launch.count("--tensor-parallel-size")
    if made.model is None or tensor is None:
        return
    key = "tensor_parallel" if made.tensor_parallel else "launch_file"
    parallel = Parallel(
        tensor,
        launch.count("--pipeline-parallel-size") or 1,
        launch.count("--data-parallel-size") or 1,
        "--enable-expert-parallel" in launch.flags,
    )
    try:
        kv_layout_of(Setup(model=made.model, gpu=made.gpu, parallel=parallel))
    except SizingError as exc:
        raise SettingsError(f"{settings.origin(key)}: {exc}") from exc


def _launch(settings: Settings) -> Launch | None:
    path = settings["launch_file"]
    if path is None:
        return None
    origin = f"{settings.origin('launch_file')}: launch_file {path}"
    launch = parse_launch(_read(Path(path), origin), origin=origin)
    for flag in NUMBERS:
        if launch.number(flag) == 0 and flag != "--long-prefill-token-threshold":
            raise SettingsError(f"{origin}: {flag} is 0; vLLM takes 1 or more")
    return launch


def _model(settings: Settings, launch: Launch | None) -> Model | None:
    name = settings["model"]
    if name is None:
        return _served(launch)
    try:
        return named_model(name)
    except SizingError as exc:
        near = f"; near: {', '.join(exc.choices)}" if exc.choices else ""
        raise SettingsError(f"{settings.origin('model')}: {exc}{near}") from exc


def _served(launch: Launch | None) -> Model | None:
    """The model that the command line serves, where the catalogue or the disk has it."""
    if launch is None or not launch.model:
        return None
    try:
        return named_model(launch.model)
    except SizingError:
        # Nobody stated it to us: without it recommendations are relative.
        return None


def _gpu(settings: Settings) -> Gpu | None:
    name = settings["gpu"]
    if name is None:
        return None
    try:
        return recognise(name) or gpu(name)
    except SizingError as exc:
        raise SettingsError(f"{settings.origin('gpu')}: {exc}") from exc


def _version(settings: Settings) -> tuple[int, int, int] | None:
    try:
        return stated_version(settings["vllm_version"])
    except SizingError as exc:
        raise SettingsError(f"{settings.origin('vllm_version')}: {exc}") from exc


def _read(path: Path, origin: str) -> str:
    try:
        # A pipe would be waited for, a device read without end.
        if not path.is_file() and path.exists():
            raise SettingsError(f"{origin}: not a regular file")
        if path.stat().st_size > LARGEST_BYTES:
            raise SettingsError(f"{origin}: larger than {LARGEST_BYTES // 1024} KiB")
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{origin}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{origin}: not text: {exc.reason}") from exc
