"""Runs all tests, then those few that failed once more: alone, in one process.

    python -m tests.again [arguments of pytest]

A test that failed beside others and passes alone has a race, which a busy machine brings out. The
last lines of the log name it, and the run passes. A test that fails twice fails the run. More than
AGAIN_MAX failures, an error during collection and a process that crashed fail it at once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

AGAIN_MAX = 5
"""More failures than this are no races."""

CRASH = "???"
"""When a test failed by the end of its process, as pytest-xdist reports it."""


class Failures:
    """A pytest plugin that notes which tests failed."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}
        self.others = 0
        """Errors that are no test's: of collection, and crashed processes."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failed setup, call or teardown."""
        if report.failed:
            self.tests[report.nodeid] = None
            self.others += str(report.when) == CRASH

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        self.others += report.failed


def main(arguments: Sequence[str]) -> int:
    """The exit status: pytest's of the first run, or of the second where there is one."""
    failures = Failures()
    status = pytest.main(list(arguments), [failures])
    tests = list(failures.tests)
    is_tests_only = status == pytest.ExitCode.TESTS_FAILED and not failures.others
    if not (is_tests_only and 1 <= len(tests) <= AGAIN_MAX):
        return int(status)
    print(f"\n{len(tests)} failed beside others; once more, alone:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-v", *tests], check=False).returncode
    verdict = "passed alone" if again == 0 else "NOT ALL PASSED ALONE"
    for test in tests:
        print(f"failed beside others, {verdict}: {test}", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
