"""The systemd unit, as systemd itself reads it."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agent.running import Main

PACKAGING = Path(__file__).parents[3] / "packaging"
UNIT = PACKAGING / "kneewatch.service"
MOST_EXPOSED = 2.0
"""systemd's own scale: 10 is a service without any protection."""


def command() -> list[str]:
    """What the unit starts, without the program's path."""
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(UNIT.read_text())
    return parser["Service"]["ExecStart"].split()[1:]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(re.sub(r"/opt/\S+/kneewatch ", "/bin/true ", UNIT.read_text()))
    ended = subprocess.run(
        ["systemd-analyze", "verify", here], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", here],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", ended.stdout)
    assert match is not None, ended.stderr
    assert float(match[1]) <= MOST_EXPOSED


def test_what_is_started_is_a_command(main: Main) -> None:
    """The flags are the program's: it gets as far as the settings file, which is not there."""
    ended = main(*command())
    assert (ended.status, ended.out) == (2, "")
    assert "settings file /etc/kneewatch/kneewatch.toml: No such file" in ended.err
    container = (PACKAGING / "Containerfile").read_text()
    assert f"CMD {command()}".replace("'", '"') in container
    assert re.search(r"(?m)^USER [1-9]\d*:", container), "not root"
