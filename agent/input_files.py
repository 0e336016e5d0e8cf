"""Reads files that a user names: model configuration, workload profile, benchmark. No network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model, model, model_from_config

CONFIG = "config.json"
LARGEST_BYTES = 8 * 1024 * 1024
LARGEST_TEXT_BYTES = 4 * 1024 * 1024


def named_model(name: str, environ: Mapping[str, str] = os.environ) -> Model:
    """The model of a path, a catalogue id, or an id in the local Hugging Face cache.

    Raises:
        SizingError: the name is none of these, or the configuration is unusable.
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
        raise SizingError(f"{path} does not exist", name="model")
    try:
        return model(name)
    except SizingError:
        cached = _cached(name, environ)
        if cached is None:
            raise
        return model_from_config(name, _document(cached))


def _cached(name: str, environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = hub / ("models--" + name.replace("/", "--")) / "snapshots"
    if "/" not in name or not folder.is_dir():
        return None
    configs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    return configs[-1] if configs else None


def _document(path: Path) -> object:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise SizingError(f"{path} is too large for a model configuration", name="model")
        return json.loads(path.read_bytes())
    except OSError as exc:
        raise SizingError(f"{path} cannot be read: {exc.strerror}", name="model") from exc
    except (ValueError, RecursionError) as exc:
        raise SizingError(f"{path} is not JSON: {exc}", name="model") from exc


def profile_text(path: str, name: str) -> str:
    """The text of a workload profile; `example` is the shipped one.

    Raises:
        SizingError: as `text_of`.
    """
    from kneewatch.diagnose.sizing.plan.workload_profile import example_profile

    return example_profile() if path == "example" else text_of(path, name)


def text_of(path: str, name: str) -> str:
    """The contents of a text file.

    Raises:
        SizingError: the file is missing, too large, unreadable or not text.
    """
    try:
        if not Path(path).is_file():
            reason = "is not a regular file" if Path(path).exists() else "does not exist"
            raise SizingError(f"{path} {reason}", name=name)
        if Path(path).stat().st_size > LARGEST_TEXT_BYTES:
            raise SizingError(f"{path} is larger than {LARGEST_TEXT_BYTES:,} bytes", name=name)
        return Path(path).read_text("utf-8")
    except OSError as exc:
        raise SizingError(f"{path[:200]} cannot be read: {exc.strerror}", name=name) from exc
    except UnicodeDecodeError as exc:
        raise SizingError(f"{path} is not a text file", name=name) from exc
