"""Shell completion: scripts for three shells, and the bash one at work in a real bash."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.agent.running import ARGV, Main, environment
from tests.programs import require


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("bash", "complete -o nosort -F _kneewatch_completion kneewatch"),
        ("zsh", "#compdef kneewatch"),
        ("fish", "complete --no-files --command kneewatch"),
    ],
)
def test_a_script(main: Main, shell: str, says: str) -> None:
    ended = main("completion", shell)
    assert ended.status == 0
    assert says in ended.out
    assert "_KNEEWATCH_COMPLETE" in ended.out


def test_no_script(main: Main) -> None:
    ended = main("completion", "tcsh")
    assert (ended.status, ended.out) == (2, "")
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in ended.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program as `kneewatch`, its completion script, and a capture."""
    folder = tmp_path_factory.mktemp("completion")
    program = folder / "bin" / "kneewatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(ARGV)} "$@"\n')
    program.chmod(0o755)
    with (folder / "kneewatch.bash").open("w") as script:
        subprocess.run(
            [program, "completion", "bash"], stdout=script, check=True, env=environment()
        )
    (folder / "night.jsonl.gz").touch()
    return folder


DRIVE = """
source ./kneewatch.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_kneewatch_completion kneewatch "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("kneewatch re", {"record", "replay", "report"}),
        ("kneewatch completion ", {"bash", "zsh", "fish"}),
        ("kneewatch demo --format ", {"text", "json", "markdown"}),
        ("kneewatch diagnose --slo", {"--slo-ttft", "--slo-itl"}),
        ("kneewatch config --kubernetes-n", {"--kubernetes-namespaces", "--kubernetes-node"}),
    ],
)
def test_bash_completes(folder: Path, typed: str, wanted: set[str]) -> None:
    done = subprocess.run(
        [require("bash"), "-c", DRIVE, "bash", *typed.split(" ")],
        cwd=folder,
        env=environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == wanted
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["replay", "diagnose"])
def test_files_are_left_to_the_shell(command: str) -> None:
    done = subprocess.run(
        ARGV,
        env=environment(
            _KNEEWATCH_COMPLETE="bash_complete",
            COMP_WORDS=f"kneewatch {command} ni",
            COMP_CWORD="2",
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "file,ni\n"
