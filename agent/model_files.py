"""The model that `--model` names: a catalogue id, a configuration on disk, or an id that
Hugging Face's cache already holds. Never the network. I/O edge."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from kneewatch.diagnose.catalogue.models import Model, model, model_from_config
from kneewatch.diagnose.sizing.inputs import SizingError

CONFIG = "config.json"
LARGEST_BYTES = 8 * 1024 * 1024


def named_model(name: str, environ: Mapping[str, str] = os.environ) -> Model:
    """The model by path, by catalogue id, or by an id in the cache on this disk.

    Raises:
        SizingError: none of these, or a configuration that cannot be used.
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
        raise SizingError(f"there is no {path}", name="model")
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
    found = sorted(folder.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _document(path: Path) -> object:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise SizingError(f"{path} is too large for a model configuration", name="model")
        return json.loads(path.read_bytes())
    except OSError as exc:
        raise SizingError(f"{path} cannot be read: {exc.strerror}", name="model") from exc
    except (ValueError, RecursionError) as exc:
        raise SizingError(f"{path} is not JSON: {exc}", name="model") from exc
