"""Reads the model's config.json and the GPUs of a server's process on this node. I/O edge; no
network."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Callable, Collection
from pathlib import Path

from kneewatch.agent.server.process import FileError, ServerProcess, namespace, read_file
from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml_calls import NodeGpu, Nvml, load_nvml, node_gpus
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model, model_from_config
from kneewatch.diagnose.deployment.server_facts import (
    CONFIG_FILE,
    GPU_UUIDS,
    GPUS,
    SERVER_GPUS,
    SourceReading,
    models_reading,
    printable,
)
from kneewatch.diagnose.verdict import Value

CONFIG = "config.json"
CONFIG_MAX_BYTES = 1024 * 1024
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_REVISION = re.compile(r"[\w-][\w.-]{0,95}")


def read_model(server: ServerProcess, now_s: float) -> SourceReading:
    """The model, read from the config.json that the process uses. Empty for a model of the
    catalogue.

    If the file cannot be used, a note contains the reason.
    """
    name = server.launch.model
    nothing = SourceReading(CONFIG_FILE, now_s)
    if not name or "\0" in name or _in_catalogue(name):
        return nothing
    try:
        document = json.loads(_config(name, server))
        return SourceReading(CONFIG_FILE, now_s, model=model_from_config(name, document))
    except (FileError, SizingError) as exc:
        note = str(exc)
    except (ValueError, RecursionError):
        note = "not JSON"
    return SourceReading(CONFIG_FILE, now_s, notes=(f"{CONFIG} of the model: {printable(note)}",))


def _in_catalogue(name: str) -> bool:
    try:
        model(name)
    except SizingError:
        return False
    return True


def _config(name: str, server: ServerProcess) -> bytes:
    """The contents of the model's config.json.

    Raises:
        FileError: the file cannot be read, or a link leads out of the model's folder.
    """
    if not server.shares_files:
        raise FileError("the file is in the server's container; set model")
    folder = None if server.folder is None else server.folder / name
    if Path(name).is_absolute():
        folder = Path(name)
    if folder is not None and folder.is_dir():
        return _inside(folder, folder / CONFIG, server)
    cached = _snapshot(name, server)
    if cached is None:
        raise FileError(f"{name} is neither a folder nor in the Hugging Face cache; set model")
    return _inside(*cached, server)


def _snapshot(name: str, server: ServerProcess) -> tuple[Path, Path] | None:
    """The model's folder in the process's Hugging Face cache, and the config.json in it. None if
    not found."""
    hub = _hub(server)
    if hub is None or not _ID.fullmatch(name):
        return None
    folder = hub / f"models--{name.replace('/', '--')}"
    revision = server.launch.text("--revision") or "main"
    if not _REVISION.fullmatch(revision):
        return None
    reference = folder / "refs" / revision
    if reference.is_file():
        revision = _inside(folder, reference, server)[:100].decode("ascii", "replace").strip()
    if not _REVISION.fullmatch(revision):
        return None
    config = folder / "snapshots" / revision / CONFIG
    return (folder, config) if config.exists() else None


def _hub(server: ServerProcess) -> Path | None:
    """The folder of the Hugging Face cache: from the process's environment, else in the home folder
    of its user."""
    environ = server.environ or {}
    if "HF_HUB_CACHE" in environ:
        hub = Path(environ["HF_HUB_CACHE"])
    elif "HF_HOME" in environ:
        hub = Path(environ["HF_HOME"]) / "hub"
    else:
        try:
            home = environ.get("HOME") or pwd.getpwuid(server.user_id).pw_dir
        except KeyError:
            return None
        hub = Path(environ.get("XDG_CACHE_HOME") or Path(home) / ".cache") / "huggingface" / "hub"
    return hub if hub.is_absolute() else None


def _inside(folder: Path, path: Path, server: ServerProcess) -> bytes:
    """The contents of a file. Files in the cache are links to blobs; the target of a link must be
    in `folder` too.

    Raises:
        FileError: the file cannot be read, or a link leads out of `folder`.
    """
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        inside = resolved.is_relative_to(os.path.realpath(folder, strict=True))
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a path"
        raise FileError(f"{path} cannot be read: {reason}") from exc
    if not inside:
        raise FileError(f"{path} links to a file outside {folder}")
    return read_file(resolved, CONFIG_MAX_BYTES, user_id=server.user_id)


# --- The GPUs that a server's process on this node uses. I/O edge ---------------------------------


NODE_PIDS = "pid:[4026531836]"
"""The process-id namespace of the node itself (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

OTHER_PIDS = (
    "cannot tell which GPUs the server uses: the driver reports process ids of the node, which "
    "kneewatch's container does not see; set hostPID: true, or the setting gpu"
)
PARTS = "the server uses MIG instances: set gpu"


def read_gpus(
    pid: int, now_s: float, *, load: Callable[[], Nvml] = load_nvml, pids: str | None = None
) -> SourceReading:
    """The GPUs of a server's process and of its child processes. Without a driver there are no
    facts and no note.

    If these GPUs are unknown, but all GPUs of the node are of the same model, that model is a fact.
    `pids` is kneewatch's own process-id namespace; None: read it.
    """
    comparable = (namespace("self", "pid") if pids is None else pids) == NODE_PIDS
    try:
        gpus = node_gpus(_family(pid) if comparable else (), load)
    except CollectError as error:
        notes = () if error.kind == "no_gpu" else (f"GPUs of the server: {error}",)
        return SourceReading(GPUS, now_s, notes=notes)
    if not gpus:
        return SourceReading(GPUS, now_s)
    used = [gpu for gpu in gpus if gpu.is_used]
    if any(gpu.is_part for gpu in used):
        return SourceReading(GPUS, now_s, notes=(PARTS,))
    values = _model(used if comparable else gpus)
    if used:
        values[SERVER_GPUS] = len(used)
        values[GPU_UUIDS] = " ".join(gpu.uuid for gpu in used)
    return SourceReading(GPUS, now_s, values, notes=() if comparable else (OTHER_PIDS,))


def _model(gpus: Collection[NodeGpu]) -> dict[str, Value]:
    """Model and memory of the GPUs, if all are of the same model. Empty if they differ."""
    values = dict(models_reading([gpu.name for gpu in gpus], 0.0).values)
    values.pop(SERVER_GPUS, None)
    if "gpu_name" not in values:
        return {}
    bytes_each = {gpu.memory_bytes for gpu in gpus}
    least_bytes = min((size for size in bytes_each if size is not None), default=None)
    if least_bytes is not None:
        values["gpu_memory_gib"] = round(least_bytes / GIB, 2)
    return values


def _family(pid: int) -> set[int]:
    """The ids of a process and of all its descendants."""
    import psutil

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}
