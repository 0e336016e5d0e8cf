"""vLLM's log on the command line: why a server did not start or died, and files that change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.server_log import LogFollower, read_log
from kneewatch.collector.errors import SettingsError
from tests.agent.running import Main
from tests.diagnose.deployment import logs
from tests.recordings import CAPTURES
from tests.reports.schema import problems

UNUSED = "http://127.0.0.1:9"
KV_LEFT = "Available KV cache memory: {} GiB"


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


def told(main: Main, *flags: object) -> dict[str, Any]:
    done = main("diagnose", *flags, "--format", "json")
    (line,) = done.out.splitlines()
    document: dict[str, Any] = json.loads(line)
    assert problems(document) == []
    assert done.status == (1 if document["causes"] else 0)
    return document


def test_a_start_that_failed_names_the_line_and_the_context_that_fits(
    main: Main, log_file: Path
) -> None:
    log_file.write_text(logs.KV_TOO_SMALL)
    document = told(main, "--log", log_file)
    (cause,) = document["causes"]
    assert (cause["id"], cause["severity"]) == ("startup_failed", "critical")
    assert "ValueError: To serve at least one request" in cause["evidence"][0]["text"]
    (first, *_) = document["recommendations"]
    # 5.625 GiB of bf16 KV for 40,960 tokens are 147,456 bytes a token; 4.50 GiB hold 32,768 tokens.
    assert first["changes"] == [{"flag": "--max-model-len", "from": 40960, "to": 32512}]
    assert document["log"]["version"]["value"] == "0.11.0"
    assert document["log"]["weights_gib"]["line"].startswith("Model loading took 15.2683 GiB")


def test_more_of_the_gpu_or_more_gpus_where_the_gpu_is_stated(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL.replace("'gpu_memory_utilization': 0.9", "'seed': 0.6"))
    stated = ("--gpu", "a100-80gb", "--vllm-version", "0.11.0")
    made = told(main, "--log", log_file, *stated)["recommendations"]
    changes = {one["id"]: one["changes"][0] for one in made}
    # 5.62 - 4.50 GiB of an 80 GB A100 are 1.5 points of utilization beside the default of 0.90.
    assert changes["gpu-memory-utilization"] == {
        "flag": "--gpu-memory-utilization",
        "from": 0.9,
        "to": 0.92,
    }
    assert changes["tensor-parallel"]["to"] == 2


def test_what_to_state_where_the_model_is_unknown(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL.replace("Qwen/Qwen3-8B", "/models/ours"))
    done = main("diagnose", "--log", log_file)
    assert done.status == 1
    assert "--max-model-len 40960 -> 32768" in done.out
    assert "state --model, --gpu" in done.out


@pytest.mark.parametrize("path", ["/etc", ".", "../../x/y", "a/b"])
def test_no_file_that_the_log_names_is_read(main: Main, log_file: Path, path: str) -> None:
    local = log_file.parent / "a" / "b"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{")
    log_file.write_text(logs.KV_TOO_SMALL.replace("Qwen/Qwen3-8B", path))
    assert "a/b is" not in main("diagnose", "--log", log_file).err


def test_memory_of_others_on_the_gpu(main: Main, log_file: Path) -> None:
    line = (
        "(EngineCore_DP0 pid=7) ERROR 10-08 20:33:48 [core.py:708] ValueError: Free memory on "
        "device cuda:0 (41.2/79.1 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.19 GiB). Decrease GPU memory utilization\n"
    )
    log_file.write_text(logs.KV_TOO_SMALL.partition("(EngineCore_DP0 pid=18799) ERROR")[0] + line)
    (made,) = told(main, "--log", log_file)["recommendations"]
    assert made["changes"] == [{"flag": "--gpu-memory-utilization", "from": 0.9, "to": 0.52}]


def test_an_engine_that_died(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.ENGINE_DIED)
    (cause,) = told(main, "--log", log_file)["causes"]
    assert cause["id"] == "engine_died"
    assert "CUDA out of memory" in cause["evidence"][0]["text"]


def test_a_healthy_log_gives_its_facts(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.V0_19)
    done = main("diagnose", "--log", log_file)
    assert done.status == 0
    assert "version 0.19.1" in done.out
    assert "kv cache 686,320 tokens" in done.out
    assert told(main, "--log", log_file)["health"] == "ok"
    assert main("diagnose", "--log", log_file, "--format", "markdown").status == 0


def test_a_start_that_goes_on_is_unknown(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.V0_19.partition("(Worker_TP0")[0])
    assert main("diagnose", "--log", log_file).status == 2


def test_a_target_that_does_not_answer(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL)
    document = told(main, UNUSED, "--log", log_file)
    assert [cause["id"] for cause in document["causes"]] == ["startup_failed"]
    log_file.write_text(logs.V0_19)
    done = main("diagnose", UNUSED, "--log", log_file)
    assert (done.status, "refused" in done.err) == (2, True)


def test_the_log_states_what_the_settings_do_not(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.V0_19.replace("'max_num_seqs': 32", "'max_num_seqs': 128"))
    capture = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    given = ("--window", "15s", "--log", log_file)
    assert told(main, capture, *given)["log"]["tensor_parallel"]["value"] == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--log", "/no/such"), "server_log /no/such: No such file"),
        (("--log", "/dev/zero"), "not a regular file"),
        (("--log", "pipe"), "not a regular file"),
        (("--log", "empty"), "no line of a vLLM start-up"),
        (("--log", "empty", "--prometheus", UNUSED), "--log is of one server"),
        ((), "Missing argument 'TARGET'"),
    ],
)
def test_mistakes(main: Main, tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"\x00\xff" * 1000)
    done = main("diagnose", *flags)
    assert (done.status, says in done.err) == (2, True)


def follow(follower: LogFollower) -> float | None:
    while follower.read(64):
        pass
    return follower.log.number("available_kv_gib")


def line(gib: float) -> str:
    return f"INFO 10-08 20:33:48 [gpu_worker.py:298] {KV_LEFT.format(gib)}\n"


def test_a_file_that_grows_is_truncated_and_is_rotated(log_file: Path) -> None:
    log_file.write_text(line(4.5)[:40])
    follower = LogFollower(str(log_file))
    assert follow(follower) is None
    log_file.write_text(line(4.5))
    assert follow(follower) == 4.5
    log_file.write_text(line(3.5)[:-10])
    assert follow(follower) == 4.5
    log_file.rename(log_file.with_suffix(".1"))
    log_file.write_text("x" * 200 + "\n" + line(2.5))
    assert follow(follower) == 2.5


def test_one_read_is_bounded(log_file: Path) -> None:
    log_file.write_bytes(b"x" * 10_000)
    follower = LogFollower(str(log_file))
    assert [follower.read(4096) for _ in range(4)] == [4096, 4096, 1808, 0]


def test_the_end_of_a_large_file_is_read(log_file: Path) -> None:
    with log_file.open("wb") as file:
        file.truncate(1 << 36)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(4.5).encode())
    assert read_log(str(log_file)).number("available_kv_gib") == 4.5


def test_a_file_that_is_gone_is_an_error_and_read_again_when_it_is_back(log_file: Path) -> None:
    follower = LogFollower(str(log_file))
    with pytest.raises(SettingsError, match="No such file"):
        follower.read()
    log_file.write_text(line(4.5))
    assert follow(follower) == 4.5
