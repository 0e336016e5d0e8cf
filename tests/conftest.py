"""How all tests run: property tests without deadlines (machines are shared and slow), Ctrl-C that
works in background jobs, and the marker `quick` for tests that use only this process."""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared", SHARED)
settings.register_profile("quick", SHARED, max_examples=10)
settings.load_profile("shared")

# Programs that tests start share their bytecode, and those in Go collect garbage less often: a
# third of the CPU that tests take would go into both.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("GOGC", "400")

# A shell's background job ignores SIGINT, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent

OUTSIDE = (
    "asyncio", "fastapi", "http", "httpx", "multiprocessing", "playwright", "pty", "schemathesis",
    "signal", "smtplib", "socket", "socketserver", "ssl", "subprocess", "textual", "threading",
    "urllib.request", "uvicorn", "tests.programs",
)  # fmt: skip
"""Modules for servers, browsers and other programs."""

SLOW = (
    "kneewatch.agent.store", "kneewatch.collector.captures",
    "kneewatch.diagnose.sizing.configuration_search",
    "kneewatch.reports.weekly.page.charts", "kneewatch.reports.weekly.page.html",
    "kneewatch.reports.weekly.build_report", "tests.accuracy", "tests.contract.golden",
    "tests.ramps", "tests.recordings", "tests.simulator",
)  # fmt: skip
"""Modules that write databases, play recordings, simulate, search thousands of configurations, or
make weekly reports and their charts: seconds a test."""

FORBIDDEN_EVENTS = (
    "os.fork",
    "os.posix_spawn",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
)
"""Audit events that fail a `quick` test."""

running: list[str] = []
"""The node id of the `quick` test that runs now, if one does."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--half 0` and `--half 1` are two runs that share the files out: collecting takes longer than
    `quick` tests do, and each worker of xdist collects all of them."""
    parser.addoption("--half", type=int, choices=(0, 1))


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples of properties in `make quick`."""
    if is_quick(config):
        settings.load_profile("quick")


def is_quick(config: pytest.Config) -> bool:
    """Whether only `quick` tests are asked for."""
    return str(config.getoption("markexpr")).startswith("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that have no `quick` test, most of the time of a quick run, and of
    the other half's."""
    name = collection_path.name
    if not (name.startswith("test_") and collection_path.suffix == ".py" and is_quick(config)):
        return None
    half: int | None = config.getoption("half")
    others = half is not None and crc32(name.encode()) % 2 != half
    return True if others or not is_inside(name_of(collection_path)) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests `quick` whose modules and fixtures, and the helpers in tests/ that these
    import, import nothing of OUTSIDE and SLOW."""
    for item in items:
        # pytest has no public way from a test to the modules of its fixtures.
        untyped: Any = item
        fixtures: dict[str, Sequence[Any]] = untyped._fixtureinfo.name2fixturedefs
        modules: set[str] = {
            definition.func.__module__
            for definitions in fixtures.values()
            for definition in definitions
        }
        modules = {name for name in modules if name.startswith("tests.") and name != __name__}
        if all(map(is_inside, {name_of(item.path), *modules})):
            item.add_marker("quick")


def name_of(path: Path) -> str:
    """The name of a module of tests/."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def is_inside(module: str) -> bool:
    """Whether a module of tests/ imports nothing of OUTSIDE and SLOW, nor do its helpers there."""
    seen, left = set[str](), [module]
    while left:
        name = left.pop()
        if any(name == other or name.startswith(f"{other}.") for other in OUTSIDE + SLOW):
            return False
        if name not in seen and name.startswith("tests."):
            seen.add(name)
            left += imports(name)
    return True


@cache
def imports(module: str) -> frozenset[str]:
    """The absolute names that a module of tests/ imports."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.exists():  # a package, or a name in a module
        return frozenset()
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a `quick` test fail that leaves this process."""
    if item.get_closest_marker("quick"):
        running.append(item.nodeid)
    try:
        return (yield)
    finally:
        running.clear()


def _forbid(event: str, _args: tuple[object, ...]) -> None:
    if running and event in FORBIDDEN_EVENTS:
        raise RuntimeError(f"{running[0]} is marked quick and must stay in its process: {event}")


sys.addaudithook(_forbid)
