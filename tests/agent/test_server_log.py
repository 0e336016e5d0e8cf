"""vLLM's log on the command line: why a server did not start or died, and files that change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.server.log import LogFollower, read_log
from kneewatch.collector.errors import SettingsError
from tests.agent.running import Main
from tests.diagnose.deployment import logs
from tests.recordings import CAPTURES
from tests.reports.schema import problems

SERVING = (
    logs.V0_19.replace("686,320", "5,120")
    .replace("fp8_e4m3", "auto")
    .replace("0.8,", "0.92,")
    .replace("0.19.1", "0.32.0")
    .replace("'max_num_seqs': 32", "'max_num_seqs': 128")
)
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
    text = main("diagnose", "--log", log_file).out
    assert "(model Qwen/Qwen3-8B), log read" in text
    assert "run: vllm serve Qwen/Qwen3-8B" in text
    assert "restart" not in text


def test_more_of_the_gpu_or_more_gpus_where_the_gpu_is_stated(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL.replace("'gpu_memory_utilization': 0.9", "'seed': 0.6"))
    stated = ("--gpu", "a100-80gb", "--vllm-version", "0.11.0")
    recommendations = told(main, "--log", log_file, *stated)["recommendations"]
    changes = {
        recommendation["id"]: recommendation["changes"][0] for recommendation in recommendations
    }
    # 5.62 - 4.50 GiB of an 80 GB A100 are 1.5 points of utilization beside the default of 0.90.
    assert changes["gpu-memory-utilization"] == {
        "flag": "--gpu-memory-utilization",
        "from": 0.9,
        "to": 0.92,
    }
    assert changes["tensor-parallel"]["to"] == 2


def test_every_flag_of_the_logged_launch_counts_in_the_advice(main: Main, log_file: Path) -> None:
    def tokens(flags: str) -> float:
        log_file.write_text(logs.KV_TOO_SMALL.replace("'gpu_mem", f"{flags}'gpu_mem"))
        stated = ("--gpu", "a100-80gb", "--vllm-version", "0.11.0")
        recommendations = told(main, "--log", log_file, *stated)["recommendations"]
        (split,) = [each for each in recommendations if each["id"] == "tensor-parallel"]
        return float(split["predicted"]["kv_capacity_tokens"])

    # 4 GiB of weights in host memory leave room for more KV cache, and adapters take room.
    adapters = "'enable_lora': True, 'max_loras': 8, 'max_lora_rank': 64, "
    assert tokens("'cpu_offload_gb': 4.0, ") > tokens("") > tokens(adapters)


def test_what_to_state_where_the_model_is_unknown(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL.replace("Qwen/Qwen3-8B", "/models/ours"))
    done = main("diagnose", "--log", log_file)
    assert done.status == 1
    assert "--max-model-len 32768 (now 40960)" in done.out
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
    (recommendations,) = told(main, "--log", log_file)["recommendations"]
    assert recommendations["changes"] == [
        {"flag": "--gpu-memory-utilization", "from": 0.9, "to": 0.52}
    ]


def test_more_requests_than_states(main: Main, log_file: Path) -> None:
    line = (
        "(EngineCore_DP0 pid=7) ERROR 10-08 20:33:48 [core.py:708] ValueError: max_num_seqs (1024) "
        "exceeds available Mamba cache blocks (856). Each decode sequence requires one Mamba cache "
        "block, so CUDA graph capture cannot proceed.\n"
    )
    log_file.write_text(logs.KV_TOO_SMALL.partition("(EngineCore_DP0 pid=18799) ERROR")[0] + line)
    (recommendations,) = told(main, "--log", log_file)["recommendations"]
    assert recommendations["changes"] == [{"flag": "--max-num-seqs", "from": 1024, "to": 512}]


def test_an_engine_that_died(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.ENGINE_DIED)
    (cause,) = told(main, "--log", log_file)["causes"]
    assert cause["id"] == "engine_died"
    assert "CUDA out of memory" in cause["evidence"][0]["text"]


def test_a_healthy_log_gives_its_facts(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.V0_19)
    done = main("diagnose", "--log", log_file)
    assert done.status == 0
    assert "from the log: vLLM 0.19.1" in done.out
    assert "KV cache size in tokens 686,320" in " ".join(done.out.split())
    assert "weights_gib" not in done.out
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
    log_file.write_text(SERVING)
    capture = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    given = ("--window", "15s", "--log", log_file)
    assert told(main, capture, *given)["log"]["tensor_parallel"]["value"] == 4


def test_the_facts_of_a_log_that_was_refused_are_not_printed(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.V0_19)
    capture = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    done = main("diagnose", capture, "--window", "15s", "--log", log_file, "--format", "json")
    assert "log" not in done.documents[0]
    assert "from another start of the server and is ignored: it has" in done.err


def test_a_log_given_as_target_names_the_option(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL)
    done = main("diagnose", log_file)
    assert done.status == 2
    assert f"is a vLLM log, not a capture: use --log {log_file}" in " ".join(done.err.split())


def test_when_a_log_without_a_year_was_written_is_unknown(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL)
    assert told(main, "--log", log_file)["causes"][0]["since"] is None
    for form in ("text", "markdown"):
        assert "since" not in main("diagnose", "--log", log_file, "--format", form).out.lower()


def test_inspect_of_a_dead_server_prints_the_facts_of_its_log(main: Main, log_file: Path) -> None:
    log_file.write_text(logs.KV_TOO_SMALL)
    done = main("inspect", UNUSED, "--log", log_file, "--tp", "2")
    assert done.status == 0
    assert "connection refused: only the settings and" in done.err
    facts = {row.split()[0]: row.split()[1:] for row in done.out.splitlines() if row.strip()}
    assert facts["weights_gib"][0] == "log"
    assert facts["weights_gib"][-1] == "15.2683"
    assert facts["tensor_parallel"][0] == "setting"
    log_file.write_text("")
    assert main("inspect", UNUSED, "--log", log_file).status == 2


OUT_OF_MEMORY = (
    "ERROR 10-08 20:33:48 [core.py:708] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB. GPU 0 has a total capacity of {} GiB of which 1.12 GiB is free. {} Of the "
    "allocated memory {} GiB is allocated by PyTorch, and 66.00 MiB is reserved by PyTorch\n"
)
OWN = "Including non-PyTorch memory, this process has 78.02 GiB memory in use."


@pytest.mark.parametrize(
    ("total", "holders", "allocated", "first"),
    [
        ("79.15", OWN, "77.00", "Lower --gpu-memory-utilization"),
        (
            "79.15",
            f"Process 811 has 512.00 MiB memory in use. {OWN}",
            "77.00",
            "Lower --gpu-memory-utilization",
        ),
        (
            "79.15",
            "Process 811 has 30.25 GiB memory in use. Including non-PyTorch memory, this process "
            "has 47.00 GiB memory in use.",
            "46.00",
            "Other processes hold 30.2 GiB of this GPU",
        ),
        ("79.15", "Process 2398 has 78.02 GiB memory in use.", "77.00", "Lower --gpu-memory"),
        ("79.15", "Process 2398 has 78.02 GiB memory in use.", "5.00", "Check with nvidia-smi"),
        ("79.15", "", "77.00", "Check with nvidia-smi"),
        ("7.9.15", "Process 1 has 7.8.0 GiB memory in use.", "7.7.0", "Check with nvidia-smi"),
    ],
    ids=[
        "alone",
        "a monitor",
        "another server",
        "alone in a container",
        "unclear",
        "not said",
        "no numbers",
    ],
)
def test_what_to_do_follows_from_who_holds_the_memory(
    main: Main, log_file: Path, total: str, holders: str, allocated: str, first: str
) -> None:
    error = OUT_OF_MEMORY.format(total, holders, allocated)
    log_file.write_text(logs.KV_TOO_SMALL.partition("ERROR")[0] + "\n" + error)
    (cause,) = told(main, "--log", log_file)["causes"]
    assert cause["lever"].startswith(first)
    assert "the GPU ran out of memory" in cause["summary"]


HEADER = "(EngineCore_DP0 pid=7) {} 10-08 20:33:48 [core.py:708] "
STARTED, FAILED = HEADER.format("INFO"), HEADER.format("ERROR")
LAUNCHES = {
    "8b": ("Qwen/Qwen3-8B", 1, "h100-sxm", 79.19, 15.27, 52.0),
    "tight": ("Qwen/Qwen3-32B", 1, "h100-sxm", 79.19, 61.0, 4.9),
    "70b": ("meta-llama/Llama-3.3-70B-Instruct", 2, "h200", 139.8, 65.7, 53.0),
    "too large": ("Qwen/Qwen3-32B", 1, "l40s", 44.4, None, None),
}
SAMPLER = "CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try"
SEATS, SHARE, SPLIT = "max-num-seqs", "gpu-memory-utilization", "tensor-parallel"


def start_that_fails(launch: str, *, loaded: bool, sized: bool, functions: str, error: str) -> str:
    model, tensor, _, _, weights_gib, kv_gib = LAUNCHES[launch]
    lines = [
        "INFO 10-08 20:33:00 [api_server.py:1839] vLLM API server version 0.11.0",
        f"INFO 10-08 20:33:00 [utils.py:233] non-default args: {{'model': '{model}', "
        f"'max_model_len': 8192, 'tensor_parallel_size': {tensor}"
        + (
            ", 'enable_lora': True, 'max_loras': 8, 'max_lora_rank': 32}"
            if "lora" in functions
            else "}"
        ),
    ]
    if loaded and weights_gib:
        lines.append(f"{STARTED}Model loading took {weights_gib} GiB and 5.0 seconds")
    if sized and kv_gib:
        lines.append(f"{STARTED}Available KV cache memory: {kv_gib} GiB")
    lines += [
        f'{FAILED}  File "/x/{path}.py", line 12, in {name}'
        for path, _, name in (each.partition(":") for each in functions.split())
    ]
    return "\n".join((*lines, f"{FAILED}{error}", ""))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("reached", "functions", "error", "says", "advised"),
    [
        ("", "gpu_worker:load_model qwen3:__init__", "", "loaded the weights", []),
        ("L", "runner:load_model v1/spec_decode/eagle:load_model l:load_model", "", "draft", []),
        ("L", "runner:load_model lora/linear:create_lora_weights", "", "LoRA", ["max-loras"]),
        ("L", "runner:profile_run qwen2_5_vl:get_multimodal_embeddings", "", "encoder", []),
        ("L", "runner:profile_run runner:_dummy_run", "", "profile run", [SEATS]),
        ("L", "", "", "profile run", [SEATS]),
        ("L", "runner:profile_run runner:_dummy_sampler_run", "", "sampler", [SEATS]),
        ("LK", "gpu_worker:initialize_from_config r:_allocate_kv_cache_tensors", "", "KV", [SHARE]),
        ("LK", "gpu_worker:compile_or_warm_up_model r:capture_model", "", "graphs", [SHARE, SEATS]),
        ("LK", "", f"RuntimeError: {SAMPLER}", "sampler", [SEATS, SHARE]),
        ("LK", "", "", "after the KV cache was sized", [SHARE, SEATS]),
    ],
)
def test_the_phase_that_failed_decides_the_change(
    main: Main,
    log_file: Path,
    launch: str,
    reached: str,
    functions: str,
    error: str,
    says: str,
    advised: list[str],
) -> None:
    *_, gpu, total_gib, _, _ = LAUNCHES[launch]
    error = error or OUT_OF_MEMORY.format(total_gib, OWN, "75.00").partition("[core.py:708] ")[2]
    log_file.write_text(
        start_that_fails(
            launch,
            loaded="L" in reached,
            sized="K" in reached,
            functions=functions,
            error=error.rstrip(),
        )
    )
    document = told(main, "--log", log_file, "--gpu", gpu)
    found = [each["id"] for each in document["recommendations"]]
    if launch == "too large":
        assert found == [SPLIT]
    else:
        assert found == advised
        assert says in document["causes"][0]["summary"]
    for each in document["recommendations"]:
        # Each launch is one that our own sizing predicts to start.
        given = ("--gpu", gpu, "--vllm-version", "0.11.0")
        assert main("size", each["command"]["line"], *given).status == 0, each


@pytest.mark.parametrize(
    ("holders", "cached", "first", "advised"),
    [
        ("Process 4242 has 70.79 GiB memory in use. ", "66.00 MiB", "Other processes hold 70", []),
        ("Process 4242 has 20.00 GiB memory in use. ", "66.00 MiB", "Other processes", [SHARE]),
        ("", "9.00 GiB", "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", []),
    ],
)
def test_more_gpus_are_no_answer_to_other_processes_or_fragments(
    main: Main, log_file: Path, holders: str, cached: str, first: str, advised: list[str]
) -> None:
    error = OUT_OF_MEMORY.replace("PyTorch\n", "PyTorch but unallocated. If\n")
    error = error.format("79.19", f"{holders}{OWN}", "7.00").replace("66.00 MiB", cached)
    functions, error = "runner:load_model", error.partition("[core.py:708] ")[2].rstrip()
    log_file.write_text(
        start_that_fails("8b", loaded=False, sized=False, functions=functions, error=error)
    )
    document = told(main, "--log", log_file, "--gpu", "h100-sxm")
    assert document["causes"][0]["lever"].startswith(first)
    assert [each["id"] for each in document["recommendations"]] == advised


def test_nothing_is_sized_for_a_gpu_that_is_not_the_logs(main: Main, log_file: Path) -> None:
    start = logs.KV_TOO_SMALL.partition("ERROR")[0] + "\n"
    log_file.write_text(start + OUT_OF_MEMORY.format("23.68", OWN, "22.00"))
    document = told(main, "--log", log_file, "--gpu", "h100-sxm")
    assert document["recommendations"] == []
    assert (
        "what fits on these GPUs: h100-sxm has 79.2 GiB, and the log says that the GPU has 23.7 "
        "GiB; check --gpu"
    ) in document["unknown"]
    log_file.write_text(start + OUT_OF_MEMORY.format("79.15", OWN, "77.00"))
    assert told(main, "--log", log_file, "--gpu", "h100-sxm")["recommendations"] != []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--log", "/no/such"), "flag --log: server_log /no/such: No such file"),
        (("--log", "/dev/zero"), "not a regular file"),
        (("--log", "pipe"), "not a regular file"),
        (("--log", "empty"), "no vLLM start-up"),
        (("--log", "empty", "--prometheus", UNUSED), "--log belongs to one server"),
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


SGLANG_LOG = """[2026-11-01 10:00:00] server_args=ServerArgs(model_path='m', port=30000)
[2026-11-01 10:00:41 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/model_executor/model_runner.py", line 1200, in init_memory_pool
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
"""


def test_a_log_of_sglang_is_read_as_its_own(main: Main, log_file: Path) -> None:
    log_file.write_text(SGLANG_LOG)
    document = told(main, "--log", log_file)
    (cause,) = document["causes"]
    texts = f"{cause['summary']} {cause['lever']}"
    assert (document["program"], cause["id"]) == ("SGLang", "startup_failed")
    assert "no GPU memory is left for the KV cache" in cause["summary"]
    assert "--mem-fraction-static" in cause["lever"]
    assert not [word for word in ("vLLM", "--gpu-memory") if word in texts]
