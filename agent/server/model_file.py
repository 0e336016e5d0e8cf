"""Reads the config.json of the model that a process on this node serves. I/O edge; no network.

Only a file of that name is opened, below the path on the command line or in the Hugging Face cache.
"""

from __future__ import annotations

import json
import os
import pwd
import re
from pathlib import Path

from kneewatch.agent.server.files import FileError, read_file
from kneewatch.agent.server.process import ServerProcess
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model, model_from_config
from kneewatch.diagnose.deployment.server_facts import CONFIG_FILE, SourceReading, printable

CONFIG = "config.json"
CONFIG_MAX_BYTES = 1024 * 1024
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_REVISION = re.compile(r"[\w-][\w.-]{0,95}")


def read_model(server: ServerProcess, now_s: float) -> SourceReading:
    """The model of the process's config.json; none for a model of the catalogue.

    A note says why the file cannot be used.
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
    """The contents of the file.

    Raises:
        FileError: it cannot be read, or a link leads out of the model's folder.
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
    """The model's folder in the process's Hugging Face cache, and its config.json there."""
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
    """The cache's folder by the process's environment, else below its user's home."""
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
    """The contents of a file whose links all stay in the folder; the cache links to its blobs."""
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        inside = resolved.is_relative_to(os.path.realpath(folder, strict=True))
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a path"
        raise FileError(f"{path} cannot be read: {reason}") from exc
    if not inside:
        raise FileError(f"{path} links to a file outside {folder}")
    return read_file(resolved, CONFIG_MAX_BYTES, user_id=server.user_id)
