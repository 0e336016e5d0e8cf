"""Folders that are dear to fill and only read, filled once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def filled_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, or a copy of the one that another process has filled."""
    own = factory.mktemp(name)
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        make(own)
        return own
    shared = base.parent / f"{name}-shared"
    with (base.parent / f"{name}-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            make(own)
            shutil.copytree(own, base.parent / f"{name}-new")
            (base.parent / f"{name}-new").rename(shared)
            return own
    shutil.copytree(shared, own, dirs_exist_ok=True)
    return own
