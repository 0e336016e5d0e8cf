"""What the user states about the deployment, from flags to recommendations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Main
from tests.recordings import CAPTURES

CASCADE = str(CAPTURES / "kv_pressure_cascade.jsonl.gz")
STATED = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "NVIDIA H100 80GB HBM3")


def recommended(main: Main, *flags: str) -> list[dict[str, Any]]:
    lines = main("replay", CASCADE, "--format", "json", "--window", "15s", *flags).out
    return [
        recommendation
        for line in lines.splitlines()
        for recommendation in json.loads(line)["recommendations"]
    ]


def test_what_is_stated_gives_prices(main: Main) -> None:
    recommendations = recommended(main, *STATED, "--tensor-parallel", "2", "--replicas", "3")
    assert recommendations == recommended(main, *STATED, "--tp", "2", "--replicas", "3")
    costs = {
        recommendation["cost_usd_per_hour"]
        for recommendation in recommendations
        if recommendation["id"] == "replicas"
    }
    assert costs
    assert None not in costs
    unstated = recommended(main)
    assert {
        recommendation["cost_usd_per_hour"]
        for recommendation in unstated
        if recommendation["id"] == "replicas"
    } == {None}


def test_a_price_of_ones_own(main: Main) -> None:
    flags = ("--tensor-parallel", "1", "--usd-per-gpu-hour", "2.5")
    (recommendation, *_) = [row for row in recommended(main, *flags) if row["id"] == "replicas"]
    (change,) = recommendation["changes"]
    assert recommendation["cost_usd_per_hour"] == 2.5 * (change["to"] - change["from"])


def test_the_command_line_from_a_file(main: Main, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("exec vllm serve model --max-num-seqs 128 --num-gpu-blocks-override 160\n")
    recommendations = recommended(main, "--launch-file", str(script))
    seats = [
        recommendation["changes"]
        for recommendation in recommendations
        if recommendation["id"] == "max-num-seqs-down"
    ]
    assert seats
    assert all(change["from"] == 128 for changes in seats for change in changes)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "nobody/nothing"), "flag --model: model 'nobody/nothing' is not in the"),
        (("--gpu", "h1000"), "flag --gpu: unknown GPU 'h1000'"),
        (("--vllm-version", "new"), "flag --vllm-version: 'new' is not a vLLM version"),
        (("--launch-file", "/no/such"), "flag --launch-file: launch_file /no/such does not exist"),
        (("--launch-flag", "seats=3"), "--seats is no flag of vLLM that kneewatch knows"),
        (("--launch-flag", "max-num-seqs=0"), "--max-num-seqs is 0"),
        ((*STATED, "--tensor-parallel", "3"), "flag --tensor-parallel: "),
        (("--replicas", "9" * 20), "flag --replicas: replicas = "),
        (("--replicas", "0"), "flag --replicas: replicas = 0 is out of range"),
    ],
)
def test_mistakes_name_the_flag(main: Main, flags: tuple[str, ...], says: str) -> None:
    done = main("diagnose", CASCADE, *flags)
    assert done.status == 2
    assert says in done.err


def test_a_number_that_is_none_in_the_file(main: Main, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("vllm serve m --max-num-seqs many\n")
    recommendations = recommended(main, "--launch-file", str(script))
    assert any(
        "--max-num-seqs: 'many' in the launch file is not a number" in note
        for recommendation in recommendations
        for note in recommendation["unknown"]
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [("vllm serve m --max-num-seqs 0", "--max-num-seqs is 0"), ("#" * 2**22 + "\n", "larger than")],
)
def test_launch_files_that_are_refused(main: Main, tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    done = main("diagnose", CASCADE, "--launch-file", str(script))
    assert (done.status, says in done.err) == (2, True)


def test_a_pipe_is_no_launch_file(main: Main, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = main("diagnose", CASCADE, "--launch-file", str(tmp_path / "pipe"))
    assert (done.status, "not a regular file" in done.err) == (2, True)


def test_a_gpu_gives_the_peaks(main: Main) -> None:
    printed = main("diagnose", CASCADE, "--format", "json", "--gpu", "h100-sxm").out
    unknown = json.loads(printed)["unknown"]
    assert not any("peak.flop_per_s" in line for line in unknown)
