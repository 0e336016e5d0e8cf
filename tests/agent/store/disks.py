"""Disks that are full or read-only, for real: a limit on file sizes, a small file system, a user
who may not write."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
ROOT = 0


@contextmanager
def files_of_at_most(size_bytes: int) -> Generator[None]:
    """No file of this process grows beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mount(*options: str) -> None:
    """Run mount; skips the test where this user or this machine may not."""
    if os.geteuid() != ROOT or shutil.which("mount") is None:
        pytest.skip("only root mounts file systems")
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode()}")


@contextmanager
def small_disk(folder: Path, *, size: str) -> Generator[Path]:
    """A file system of a size."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def unchangeable(*files: Path) -> Generator[None]:
    """Nobody may write to the files, not even who has them open."""
    names = [str(file) for file in files]
    if os.geteuid() != ROOT or shutil.which("chattr") is None:
        pytest.skip("only root makes files immutable")
    done = subprocess.run(["chattr", "+i", *names], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"chattr: {done.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *names], check=True)


@contextmanager
def as_nobody() -> Generator[Path]:
    """A folder of a user who is not root; everything inside runs as that user."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() != ROOT:
            yield folder
            return
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(ROOT)
