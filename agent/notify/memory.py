"""What receivers have been told, kept in a small JSON file over restarts. I/O edge."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, cast

log = logging.getLogger(__name__)

SCHEMA = "kneewatch.notify/1"
LARGEST_BYTES = 16 * 1024 * 1024


def memory_file(store: Path) -> Path:
    """Where the memory of a daemon with this store is: beside the store."""
    return store.with_name(f"{store.stem}.notify.json")


class Memory:
    """The file, replaced as a whole at each change. Safe between threads. Without a path it lasts
    as long as the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        self._receivers = _read(path) if path is not None else {}
        self._is_failing = False

    def get(self, receiver: str) -> Mapping[str, Any]:
        """What was kept for a receiver; empty where there is nothing."""
        return self._receivers.get(receiver, {})

    def keep(self, receiver: str, kept: Mapping[str, Any]) -> None:
        """Keep this for a receiver. A disk that refuses is logged once, and told by duplicates
        after the next start."""
        with self._lock:
            self._receivers[receiver] = kept
            if self._path is None:
                return
            try:
                _replace(self._path, {"schema": SCHEMA, "receivers": self._receivers})
            except OSError as exc:
                if not self._is_failing:
                    log.warning(
                        "notify: cannot keep what was told file=%s error=%s", self._path, exc
                    )
                self._is_failing = True
            else:
                self._is_failing = False


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(LARGEST_BYTES))
        rows = cast("dict[str, Any]", document["receivers"])
        return {name: kept for name, kept in rows.items() if isinstance(kept, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        log.warning(
            "notify: what was told before is lost, some may be told again file=%s error=%s",
            path, type(exc).__name__,
        )  # fmt: skip
        return {}
