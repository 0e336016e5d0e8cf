"""Runs of few tests by tests/again.py: what is run twice, and what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLAKY = """
def test_race():
    assert runs > 1
"""
BROKEN = """
def test_wrong():
    assert False
"""
MANY = """
import pytest
@pytest.mark.parametrize("number", range(6))
def test_wrong(number):
    assert False
"""
CRASH = """
import os
def test_crash():
    os._exit(1)
"""
COUNT = """
from pathlib import Path
note = Path(__file__).with_suffix(".imports")
runs = int(note.read_text()) + 1 if note.exists() else 1
note.write_text(str(runs))
"""
"""Counts the imports of a file of tests."""


@pytest.mark.parametrize(
    ("tests", "status", "last_line"),
    [
        pytest.param(FLAKY, 0, "passed alone: test_few.py::test_race", id="flaky"),
        pytest.param(BROKEN, 1, "NOT ALL PASSED ALONE: test_few.py::test_wrong", id="broken"),
        pytest.param(MANY, 1, "", id="many"),
        pytest.param(CRASH, 1, "", id="crash"),
        pytest.param("1 / 0", 1, "", id="collection"),
    ],
)  # fmt: skip
def test_few_failures_are_run_again(
    tmp_path: Path, tests: str, status: int, last_line: str
) -> None:
    file = tmp_path / "test_few.py"
    file.write_text(COUNT + tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.again", "-p", "xdist", "-n", "1", file.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(last_line)
    assert ("once more, alone" in done.stdout) is bool(last_line)
