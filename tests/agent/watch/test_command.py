"""`kneewatch watch` as users run it: on a real terminal, and where there is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.api.serving import SICK_STATE, served, service_of
from tests.agent.running import ARGV, Main, bodies, capture, in_turn
from tests.agent.terminal import on_terminal
from tests.agent.watch.session import Session
from tests.collector.servers import Start
from tests.waiting import PATIENCE_S

SICK = [capture("kv_pressure_cascade"), capture("prefix_off"), "--window", "15s", "--speed", "60"]
WELL = [capture("healthy_light"), "--window", "15s", "--speed", "60"]
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|9[0-7])(?:;[0-9;]*)?m")
BEYOND = re.compile(rb"[34]8;[25];[0-9;]*m")
BUG = """\
import sys
from kneewatch.agent.watch import command, feeds
from kneewatch.agent.watch.feeds import Playback
from kneewatch.agent.watch.command import recording_feeds, show
from tests.agent.watch.screens import settings_of
from tests.waiting import PATIENCE_S

def broken(*_args):
    secret = "sword" + "fish"
    raise ZeroDivisionError("a bug")

if sys.argv[1] == "feed":
    feeds.TargetStream.replay = broken
else:
    command.details = broken
show(recording_feeds(sys.argv[2:], settings_of()), Playback(), where="")
"""


def test_keys_are_taken_and_the_terminal_is_given_back(tmp_path: Path) -> None:
    with Session(SICK, cwd=tmp_path) as session:
        shown = session.shows("CRITICAL", "kv_pressure", "do first: ")
        lines = shown.splitlines()
        assert len(lines) == 24
        assert max(map(len, lines)) <= 80
        session.press("?")
        session.shows("Exit status by the last state: 0 ok")
        session.press("\x1b")
        session.shows("first cause")
        session.press("p")
        session.shows("PAUSED")
        session.press("j")
        session.shows("▶")
        session.press("+")
        session.shows("playing x120")
        session.resize(170, 50)
        session.shows("state .* ── .*engine 0", "KV cache: ")
        session.press("q")
        status, said = session.ends()
        assert (status, said) == (1, "")
        assert session.restored
        assert COLOUR.findall(session.written)
        assert not BEYOND.findall(session.written), "colours beyond the sixteen"
        assert b"\x1b[?1000h" not in session.written, "the mouse is the terminal's own"


@pytest.mark.parametrize(
    "end", ["\x03", signal.SIGTERM, signal.SIGINT], ids=["ctrl-c", "SIGTERM", "SIGINT"]
)
def test_however_it_ends_the_terminal_is_given_back(
    tmp_path: Path, end: str | signal.Signals
) -> None:
    with Session(WELL, cwd=tmp_path) as session:
        session.shows("1 ok", "OK")
        if isinstance(end, str):
            session.press(end)
        else:
            session.stop(end)
        assert session.ends() == (0, "")
        assert session.restored


@pytest.mark.parametrize("before", ["", "trap '' HUP; "], ids=["as usual", "SIGHUP ignored"])
def test_a_terminal_that_goes_away_ends_it(tmp_path: Path, before: str) -> None:
    """Also where what starts it ignores SIGHUP; the tests themselves may run that way."""
    program = ("sh", "-c", f'{before}exec "$@"', "sh", *ARGV, "watch")
    with Session(WELL, cwd=tmp_path, program=program) as session:
        session.shows("healthy_light")
        session.hang_up()
        assert session.process.wait(PATIENCE_S) == -signal.SIGHUP


def test_live_servers_one_of_them_down(serving: Start, tmp_path: Path) -> None:
    server = serving(in_turn(bodies("kv_pressure_cascade", 30, 70)))
    args = [server.url, "127.0.0.1:1", "--interval", "0.2s", "--window", "15s"]
    with Session(args, cwd=tmp_path) as session:
        session.shows("2 critical", "kv_pressure", "target_down", f"127.0.0.1:{server.port}")
        session.press("q")
        assert session.ends()[0] == 1


def test_what_was_never_seen_is_no_data(tmp_path: Path) -> None:
    with Session(["127.0.0.1:1", "--interval", "60s"], cwd=tmp_path) as session:
        session.shows("1 unknown", "connection refused")
        session.press("q")
        assert session.ends()[0] == 2


def test_a_daemon(tmp_path: Path) -> None:
    with (
        served(service_of(SICK_STATE, names=["new"])) as server,
        Session(["--attach", server.url], cwd=tmp_path) as session,
    ):
        session.shows("daemon http://127.0.0.1:", "kv_pressure", "gpu-7:8000", "no scrape yet")
        session.press("q")
        assert session.ends()[0] == 1


def test_a_daemon_that_is_not_there(tmp_path: Path) -> None:
    with Session(["--attach", "127.0.0.1:1"], cwd=tmp_path) as session:
        session.shows("connection refused", "check that `kneewatch", "1 unknown")
        session.press("q")
        assert session.ends()[0] == 2


def test_neither_colour_nor_unicode_where_they_are_not_wanted(tmp_path: Path) -> None:
    with Session(SICK, cwd=tmp_path, env={"LANG": "C", "NO_COLOR": "1"}) as session:
        session.shows(">CRITICAL", "TTFT P99 ")
        session.press("q")
        assert session.ends()[0] == 1
        assert session.written.isascii()
        assert not COLOUR.findall(session.written)


@pytest.mark.parametrize("where", ["feed", "screen"])
def test_a_bug_is_told_once_the_screen_has_gone(tmp_path: Path, where: str) -> None:
    script = tmp_path / "bug.py"
    script.write_text(BUG)
    root = str(Path(__file__).parents[3])
    with Session(
        [where, capture("idle")],
        cwd=tmp_path,
        program=(sys.executable, str(script)),
        env={"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    ) as session:
        status, said = session.ends()
        assert status == 1, "an exception, which the program makes a 2 of"
        assert said.splitlines()[-1] == "ZeroDivisionError: a bug"
        assert "swordfish" not in said, "local variables are nobody's business"
        assert session.restored


def test_where_there_is_no_terminal(main: Main, tmp_path: Path) -> None:
    ended = main("watch", *SICK)
    assert (ended.status, ended.out) == (2, "")
    assert "stdout is not one" in ended.err
    assert "kneewatch diagnose" in ended.err
    seen = on_terminal("stdout", ["watch", *SICK], cwd=tmp_path)
    assert (seen.status, seen.terminal) == (2, "")
    assert "stdin is not one" in seen.piped


def test_a_terminal_that_cannot_be_drawn_on(tmp_path: Path) -> None:
    with Session(SICK, cwd=tmp_path, env={"TERM": "dumb"}) as session:
        status, said = session.ends()
        assert status == 2
        assert "TERM=dumb" in said
        assert session.written == b""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name servers or captures, or a daemon with --attach URL"),
        (["--attach", "http://a:1", "http://b:1"], "do not name targets as well"),
        (["x:1", "--speed", "0"], "--speed"),
        (["x:1", "--gpu", "no-such-gpu"], "no-such-gpu"),
        (["none.jsonl"], "none.jsonl: no such file"),
        (["http://h:0"], "no server listens on port 0"),
        (["--attach", "ftp://h"], "the scheme must be http or https"),
    ],
)
def test_wrong_usage(main: Main, args: list[str], said: str) -> None:
    ended = main("watch", *args)
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err


def test_other_commands_do_not_pay_for_textual() -> None:
    code = "import sys, kneewatch.agent.cli; print('textual' in sys.modules)"
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"False\n"
