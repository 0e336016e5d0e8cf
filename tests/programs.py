"""Programs that some tests need and that pip cannot install."""

from __future__ import annotations

import os
import shutil

import pytest


def require(program: str) -> str:
    """The path of a program. Where it is missing the test is skipped; with CI=true it fails."""
    path = shutil.which(program)
    if path is not None:
        return path
    message = f"{program} is not installed; `sh tests/programs.sh` installs it on Debian"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(message)
    pytest.skip(message)
