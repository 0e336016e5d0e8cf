"""Colour, width and the progress line: on a terminal only."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.agent.running import bodies, capture, in_turn, run
from tests.agent.terminal import on_terminal
from tests.collector.servers import Start

SICK = ["diagnose", capture("prefix_off"), "--window", "15s"]
ON_A_CLOCK = """
from kneewatch.agent import cli, console, stream
from tests.clock import Clock

console.time = stream.time = Clock()
cli.main()
"""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def test_colour_and_width_on_a_terminal(tmp_path: Path) -> None:
    seen = on_terminal("stdout", SICK, cwd=tmp_path)
    assert (seen.status, seen.piped) == (1, "")
    assert "\x1b[33mWARNING\x1b[0m  \x1b[1mprefix_cache_off\x1b[0m" in seen.terminal
    lines = ESCAPES.sub("", seen.terminal).splitlines()
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_colour_where_none_is_wanted(tmp_path: Path, plain: dict[str, str]) -> None:
    seen = on_terminal("stdout", SICK, cwd=tmp_path, env=plain)
    assert seen.status == 1
    assert "WARNING" in seen.terminal
    assert "\x1b" not in seen.terminal


def test_an_empty_no_color_says_nothing(tmp_path: Path) -> None:
    seen = on_terminal("stdout", SICK, cwd=tmp_path, env={"NO_COLOR": ""})
    assert "\x1b[33m" in seen.terminal


def test_no_colour_in_a_pipe(tmp_path: Path) -> None:
    ended = run(*SICK, cwd=tmp_path, TERM="xterm")
    assert "WARNING" in ended.out
    assert "\x1b" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100


def test_a_progress_line_while_watching(serving: Start, tmp_path: Path) -> None:
    server = serving(in_turn(bodies("kv_pressure_cascade", 40)))
    args = ["diagnose", server.url, "--for", "1s", "--interval", "0.25s"]
    seen = on_terminal(
        "stderr", args, cwd=tmp_path, columns=60, program=[sys.executable, "-c", ON_A_CLOCK],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert seen.status == 1
    steps = seen.terminal.split("\r\x1b[K")
    assert steps[0] == ""
    assert steps[-1] == "", "the line is gone once there is a result"
    assert re.match(r"watching 0 of 1 s  UNKNOWN  KV \d+%, run \d+, wait \d+", steps[1])
    assert re.match(r"watching 1 of 1 s  CRITICAL  kv_pressure  KV \d+%, run", steps[-2])
    assert all(len(step) < 60 for step in steps)
    assert seen.piped.startswith("CRITICAL  kv_pressure  http://127.0.0.1:")
