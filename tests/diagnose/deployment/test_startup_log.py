"""vLLM's start-up log: facts of several versions, failures with their proof, hostile logs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.deployment import startup_log as log
from kneewatch.diagnose.deployment.startup_log import LONGEST_LINE, SHOWN_CHARACTERS, StartupLog
from kneewatch.diagnose.deployment.vllm_flags import CommandLine
from kneewatch.diagnose.recommend.advice import FlagChange
from kneewatch.diagnose.recommend.serve_command import serve_command
from tests.diagnose.deployment import logs


def read(text: str) -> StartupLog:
    reader = StartupLog()
    reader.feed(text.encode())
    reader.close()
    return reader


def values(text: str) -> dict[str, object]:
    return {fact: log_fact.value for fact, log_fact in read(text).facts.items()}


def start(*lines: str, version: str = "0.11.0") -> str:
    header = f"INFO 10-08 20:33:00 [api_server.py:1839] vLLM API server version {version}"
    return "\n".join((header, *lines, ""))


READY = "INFO:     Application startup complete."
ERROR = "(EngineCore_DP0 pid=7) ERROR 10-08 20:33:48 [core.py:708] "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            logs.V0_6,
            {
                "version": "0.6.6",
                "model": "acme/small",
                "dtype": "bfloat16",
                "max_model_len": 4096,
                "gpu_memory_utilization": 0.9,
                "tensor_parallel": 1,
                "pipeline_parallel": 1,
                "enforce_eager": False,
                "attention_backend": "Flash Attention",
                "weights_gib": 14.9888,
                "gpu_memory_gib": 23.68,
                "available_kv_gib": 5.06,
                "gpu_blocks": 2590,
                "concurrency_tokens": 4096,
                "max_concurrency": 10.12,
                "graph_s": 13,
                "graph_gib": 0.27,
            },
            id="0.6",
        ),
        pytest.param(
            logs.V0_8_V1,
            {
                "version": "0.8.5",
                "attention_backend": "Flash Attention",
                "weights_gib": 6.4102,
                "load_s": 1.902797,
                "available_kv_gib": 18.83,
                "kv_cache_tokens": 176240,
                "concurrency_tokens": 8192,
                "max_concurrency": 21.51,
                "graph_s": 19,
                "graph_gib": 0.54,
            },
            id="0.8, two ranks: the fullest one counts",
        ),
        pytest.param(
            logs.V0_19,
            {
                "version": "0.19.1",
                "model": "acme/large-FP8",
                "max_model_len": 65536,
                "tensor_parallel": 4,
                "gpu_memory_utilization": 0.8,
                "kv_cache_dtype": "fp8_e4m3",
                "enable_prefix_caching": False,
                "enforce_eager": True,
                "max_num_seqs": 32,
                "dtype": "bfloat16",
                "pipeline_parallel": 1,
                "data_parallel": 1,
                "attention_backend": "FLASHINFER",
                "weights_gib": 12.66,
                "load_s": 31.657031,
                "available_kv_gib": 52.36,
                "kv_cache_tokens": 686320,
                "concurrency_tokens": 65536,
                "max_concurrency": 10.47,
                "graph_s": 2,
                "graph_gib": 0.11,
            },
            id="0.19",
        ),
        pytest.param(
            logs.V0_29,
            {
                "version": "0.29.0",
                "model": "/snap/",
                "max_model_len": 98304,
                "gpu_memory_utilization": 0.85,
                "dtype": "float16",
                "enforce_eager": False,
                "tensor_parallel": 1,
                "available_kv_gib": 1.62,
                "kv_cache_tokens": 112347,
                "concurrency_tokens": 98304,
                "max_concurrency": 1.14,
            },
            id="0.29, tokens and concurrency in one line",
        ),
        pytest.param(
            logs.V0_32_CPU,
            {
                "version": "0.32.0",
                "model": "/models/tiny",
                "dtype": "float32",
                "max_model_len": 2048,
                "enforce_eager": True,
                "block_size": 32,
                "max_num_seqs": 16,
                "tensor_parallel": 1,
                "available_kv_gib": 1.0,
                "kv_cache_tokens": 65536,
                "concurrency_tokens": 2048,
                "max_concurrency": 32.0,
            },
            id="0.32 on a CPU, which names the cache after its platform",
        ),
    ],
)
def test_facts_by_version(text: str, expected: dict[str, object]) -> None:
    reader = read(text)
    assert {fact: log_fact.value for fact, log_fact in reader.facts.items()} == expected
    assert (reader.phase, reader.failure) == ("serving", None)


@pytest.mark.parametrize("text", [logs.V0_6, logs.V0_19])
def test_secrets_among_the_arguments_are_not_kept(text: str) -> None:
    assert "secret" in text
    assert "secret" not in repr((read(text).facts, read(text).launch))


def test_the_logged_arguments_are_a_command_line() -> None:
    launch = read(logs.V0_19).launch
    assert launch is not None
    assert (launch.model, launch.complete) == ("acme/large-FP8", True)
    assert launch.count("--max-model-len") == 65536
    assert launch.count("--tensor-parallel-size") == 4
    assert launch.switched("enable-prefix-caching") is False
    assert "--enforce-eager" in launch.flags
    assert read(logs.V0_8_V1).launch is None


def test_every_logged_flag_is_in_the_command_and_a_secret_is_a_variable() -> None:
    """Whoever pastes the command starts the same server, with its authentication."""
    text = logs.V0_19.replace("['secret-key']", "['8675309']").replace("['x']", "['x', 'y']")
    launch = read(text).launch
    assert launch is not None
    command = serve_command(launch, "", [FlagChange("--max-num-seqs", 32, 64)])
    assert command is not None
    assert "8675309" not in repr((launch, command))
    for words in (
        '--api-key "$API_KEY"', "--host 0.0.0.0", '--lora-modules "$LORA_MODULES"',
        "--served-model-name x", '--speculative-config "$SPECULATIVE_CONFIG"', "--max-num-seqs 64",
    ):  # fmt: skip
        assert words in command.line
    assert command.unknown == (
        "the value of --api-key, which may be a secret: set API_KEY to it",
        "the value of --lora-modules, which may be a secret: set LORA_MODULES to it",
        "the value of --speculative-config: set SPECULATIVE_CONFIG to it",
        "further values of --served-model-name",
    )
    assert "--port" in (read(logs.V0_32_CPU).launch or CommandLine()).flags


def test_what_a_version_logs_and_this_log_lacks_is_named() -> None:
    assert "graph_gib" in read(logs.V0_29).not_logged
    assert read(logs.V0_19).not_logged == []
    assert "gpu_blocks" in read(logs.V0_6.replace("# GPU blocks", "blocks")).not_logged
    assert StartupLog().not_logged == []


def docker(line: str) -> str:
    return json.dumps({"log": line + "\n"})


@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param("\x1b[36m{}\x1b[0m".format, id="colours"),
        pytest.param("vllm-1  | {}".format, id="compose"),
        pytest.param("2026-05-01T21:55:54.036Z stdout F {}".format, id="kubernetes"),
        pytest.param("Aug 25 14:58:34 sys0 vllm[178]: {}".format, id="journal"),
        pytest.param("50%|####\r{}".format, id="progress bar"),
        pytest.param(docker, id="docker"),
    ],
)
@pytest.mark.parametrize("text", [logs.V0_8_V1, logs.KV_TOO_SMALL], ids=["healthy", "failed"])
def test_wrapped_lines_say_the_same(wrapped: Callable[[str], str], text: str) -> None:
    plain, other = read(text), read("\n".join(wrapped(line) for line in text.splitlines()))
    assert other.facts == plain.facts
    assert (other.phase, other.failure) == (plain.phase, plain.failure)


def test_json_records_of_a_logger() -> None:
    records = (
        {"name": "vllm.v1.worker.gpu_worker", "message": "Available KV cache memory: 4.50 GiB"},
        {"filename": "core.py", "msg": "EngineCore failed to start.", "exc_info": "Traceback\n"
         "RuntimeError: NCCL error: unhandled system error"},
    )  # fmt: skip
    reader = read("\n".join(json.dumps(record) for record in records))
    assert reader.number("available_kv_gib") == 4.5
    assert reader.failure is not None
    assert reader.failure.kind == "nccl_error"


@pytest.mark.parametrize(
    ("line", "kind", "details"),
    [
        (
            ERROR + "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine.",
            log.KV_NONE,
            {},
        ),
        (
            ERROR + "ValueError: To serve at least one request with the model's max seq len "
            "(262144), (0.55 GiB KV cache is needed, which is larger than the available KV cache "
            "memory (0.18 GiB). Based on the available memory, the estimated maximum model length "
            "is 85184.",
            log.KV_SMALL,
            {
                "max_model_len": 262144,
                "needed_gib": 0.55,
                "available_gib": 0.18,
                "longest_tokens": 85184,
            },
        ),
        (
            "ERROR 11-18 18:07:28 engine.py:366] ValueError: The model's max seq len (32768) is "
            "larger than the maximum number of tokens that can be stored in KV cache (22032).",
            log.KV_SMALL,
            {"max_model_len": 32768, "longest_tokens": 22032},
        ),
        (
            ERROR + "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). "
            "Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot "
            "proceed. Please lower max_num_seqs to at most 856 or increase gpu_memory_utilization.",
            log.FEW_STATES,
            {"max_num_seqs": 1024, "most_seqs": 856},
        ),
        (
            ERROR + "ValueError: Free memory on device cuda:0 (2.6/121.63 GiB) on startup is less "
            "than desired GPU memory utilization (0.08, 9.73 GiB). Decrease GPU memory utilization",
            log.FREE_MEMORY,
            {"free_gib": 2.6, "gpu_memory_gib": 121.63, "gpu_memory_utilization": 0.08},
        ),
        (
            ERROR + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB.",
            log.GPU_MEMORY,
            {"asked": "50.00 MiB"},
        ),
        (
            "(Worker pid=226322) ERROR 10-25 13:12:42 [multiproc_executor.py:671] RuntimeError: "
            "CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please",
            log.GPU_MEMORY,
            {"max_num_seqs": 1024, "phase": "sampler"},
        ),
        (
            ERROR + "OSError: [Errno 28] No space left on device: '/psm_12ab'",
            "shared_memory",
            {},
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error. "
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
            "shared_memory",
            {},
        ),
        (
            "(APIServer pid=1)   Value error, User-specified max_model_len (131072) is greater "
            "than the derived max_model_len (max_position_embeddings=40960 or model_max_length=",
            log.MODEL_LEN,
            {"max_model_len": 131072, "longest_tokens": 40960},
        ),
        (
            ERROR + "ValueError: The quantization method awq is not supported for the current GPU. "
            "Minimum capability: 75. Current capability: 70.",
            "quantization_unsupported",
            {"quantization": "awq"},
        ),
        (
            ERROR + "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU.",
            "quantization_unsupported",
            {},
        ),
        (
            "(VllmWorkerProcess pid=762) ERROR 07-24 08:26:01 multiproc_worker_utils.py:226] "
            "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "nccl_error",
            {},
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:133, unhandled cuda",
            "nccl_error",
            {},
        ),
        ("OSError: [Errno 98] Address already in use", "port_in_use", {}),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
            "address already in use",
            "port_in_use",
            {"port": 8000},
        ),
        (
            ERROR + "ValueError: Available memory on node 0 (3.1/12.09 GiB) on kv cache allocation "
            "is less than requested memory for kv (8.0 GiB). Decrease --kv-cache-memory-bytes",
            "host_memory_in_use",
            {},
        ),
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/no/such/model'.",
            "model_not_found",
            {},
        ),
        ("vllm: error: unrecognized arguments: --temperature 0.8", log.FLAG, {}),
        ("api_server.py: error: unrecognized arguments: --api-key token-temp", log.FLAG, {}),
        ("Killed", log.HOST_MEMORY, {}),
        ("vllm-1 exited with code 137", log.HOST_MEMORY, {}),
        (
            "Feb 22 06:35:27 host systemd[1]: vllm.service: Main process exited, code=killed, "
            "status=9/KILL",
            log.HOST_MEMORY,
            {},
        ),
    ],
)
def test_failures_at_the_start(line: str, kind: str, details: dict[str, object]) -> None:
    failure = read(start(line)).failure
    assert failure is not None
    assert (failure.kind, failure.details, failure.served) == (kind, details, False)
    assert failure.line[:20] in line
    assert "token-temp" not in failure.line
    assert read(start(line, READY)).failure is None, "it started after all"


def test_the_line_of_the_root_is_kept_not_the_first_nor_the_last() -> None:
    failure = read(logs.KV_TOO_SMALL).failure
    assert failure is not None
    assert failure.kind == log.KV_SMALL
    assert failure.line.startswith("ValueError: To serve at least one request")


def test_an_error_that_is_not_known() -> None:
    lines = (
        ERROR + "EngineCore failed to start.",
        ERROR + "ImportError: cannot import name 'x' from \"module",
        ERROR + "RuntimeError: Engine core initialization failed.",
    )
    failure = read(start(*lines)).failure
    assert failure is not None
    assert (failure.kind, failure.line) == (
        "error",
        "ImportError: cannot import name '...' from '...'",
    )


def test_an_exception_that_nothing_caught_ended_the_start() -> None:
    failure = read(logs.UNCAUGHT).failure
    assert failure is not None
    assert (failure.kind, failure.line) == (
        "error",
        "Value error, invalid literal for int() with base 10: '...'",
    )
    assert read(logs.UNCAUGHT + logs.V0_32_CPU).failure is None


def test_a_traceback_after_which_the_start_goes_on_is_no_failure() -> None:
    lines = ("Traceback (most recent call last):", "ImportError: no module named triton")
    assert read(start(*lines)).failure is not None
    goes_on = "INFO 10-08 20:33:48 [gpu_worker.py:298] Available KV cache memory: 4.5 GiB"
    assert read(start(*lines, goes_on)).failure is None


def test_an_engine_that_died() -> None:
    reader = read(logs.ENGINE_DIED)
    assert reader.failure is not None
    assert (reader.failure.kind, reader.failure.served) == (log.GPU_MEMORY, True)
    assert reader.number("kv_cache_tokens") == 686320


def test_a_death_without_its_root() -> None:
    died = (
        "(APIServer pid=1) ERROR 12-01 23:08:02 [core_client.py:564] Engine core proc "
        "EngineCore_DP0 died unexpectedly, shutting down client."
    )
    failure = read(start(READY, died)).failure
    assert failure is not None
    assert (failure.kind, failure.served) == ("error", True)
    assert failure.line.startswith("Engine core proc EngineCore_DP0 died")
    assert read(start(READY, "INFO:     Shutting down", died)).failure is None, "it was stopped"


def test_an_engine_that_goes_on_did_not_die() -> None:
    stats = "INFO 04-19 10:29:58 [loggers.py:310] Engine 000: Avg prompt throughput: 1.0 tokens/s"
    assert read(start(READY, "Killed")).failure is not None
    assert read(start(READY, "Killed", stats)).failure is None


def test_a_new_start_forgets_the_one_before() -> None:
    reader = read(logs.KV_TOO_SMALL + start(version="0.12.0"))
    assert reader.failure is None
    assert {fact: log_fact.value for fact, log_fact in reader.facts.items()} == {
        "version": "0.12.0"
    }
    again = read(logs.V0_19 + logs.KV_TOO_SMALL)
    assert again.failure is not None
    assert again.facts["version"].value == "0.11.0"
    assert "tensor_parallel" not in again.facts


PROMPTS = (
    "INFO 04-19 10:29:58 [logger.py:42] Received request cmpl-1: prompt: 'GPU KV cache size: 7 "
    "tokens', params: SamplingParams(n=1)",
    "INFO 04-19 10:29:58 [logger.py:42] EngineCore encountered a fatal error.",
    "INFO 04-19 10:29:58 [logger.py:42] GPU KV cache size: 7 tokens",
    "ERROR 04-19 10:29:58 [serving_chat.py:200] ValueError: CUDA out of memory",
    "EngineCore encountered a fatal error.",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "vLLM API server version 9.9.9",
    "Available KV cache memory: 1.00 GiB",
    'INFO:     1.2.3.4:5 - "GET /?ERROR+EngineDeadError HTTP/1.1" 200 OK',
)


@pytest.mark.parametrize("line", PROMPTS)
def test_prompts_are_neither_facts_nor_failures(line: str) -> None:
    before, after = read(logs.V0_19), read(logs.V0_19 + line + "\n")
    assert after.facts == before.facts
    assert (after.phase, after.failure) == ("serving", None)


def test_a_prompt_in_an_exception_is_not_quoted() -> None:
    lines = (
        ERROR + "EngineCore encountered a fatal error.",
        ERROR + "KeyError: 'my prompt is secret' and \"secret\" and 'secret",
    )
    failure = read(start(READY, *lines)).failure
    assert failure is not None
    assert failure.line.startswith("KeyError: '...'")
    assert "secret" not in failure.line


def test_control_characters_and_length_of_a_kept_line() -> None:
    failure = read(start(ERROR + "RuntimeError: NCCL error \x07\x00" + "x" * 5000)).failure
    assert failure is not None
    assert failure.line.isprintable()
    assert len(failure.line) == SHOWN_CHARACTERS


def test_a_line_without_an_end_is_cut_and_the_next_one_read() -> None:
    reader = StartupLog()
    for _ in range(200):
        reader.feed(b"x" * 4096)
        assert len(repr(vars(reader))) < LONGEST_LINE + 1000
    reader.feed(b"\nINFO 10-08 20:33:00 [gpu_worker.py:1] Available KV cache memory: 4.50 GiB\n")
    assert reader.number("available_kv_gib") == 4.5


def test_an_unfinished_line_is_dropped_when_the_file_is_rotated() -> None:
    reader = StartupLog()
    reader.feed(b"INFO 10-08 20:33:00 [gpu_worker.py:1] Available KV ca")
    reader.restart()
    reader.feed(b"che memory: 4.50 GiB\n")
    assert reader.facts == {}


@pytest.mark.parametrize(
    "arguments",
    [
        "{" * 9000,
        "{'model': '" + "a" * 9000,
        "{'max_model_len': 99999999999999999999999999, 'max_num_seqs': 1e999}",
        "{'model': __import__('os').system('x'), 'max_model_len': (1).__class__}",
        "{'x': \"it's\", 'y': '\\'', 'z': [[['model', 'a']]]}",
    ],
)
def test_hostile_arguments(arguments: str) -> None:
    line = f"INFO 10-08 20:33:00 [utils.py:233] non-default args: {arguments}"
    assert "max_model_len" not in values(line)


WORDS = st.sampled_from(
    [*PROMPTS, *logs.ENGINE_DIED.splitlines(), *logs.KV_TOO_SMALL.splitlines(), "{", "\x1b[", "'"]
)
PIECES = st.lists(
    st.one_of(st.binary(max_size=60), WORDS.map(str.encode), st.sampled_from([b"\n", b"\r\n"])),
    max_size=40,
)


@given(PIECES)
def test_no_bytes_make_it_fail(pieces: list[bytes]) -> None:
    reader = StartupLog()
    for piece in pieces:
        reader.feed(piece)
    reader.close()
    assert len(reader.facts) < 40
    assert all(log_fact.line.isprintable() for log_fact in reader.facts.values())
    assert all(len(log_fact.line) <= SHOWN_CHARACTERS for log_fact in reader.facts.values())
    assert reader.failure is None or reader.failure.line.isprintable()
    assert reader.version is None or len(reader.version) == 3
    assert isinstance(reader.not_logged, list)
    assert reader.launch is None or isinstance(reader.launch.flags, dict)


@given(st.integers(1, 200), st.sampled_from([logs.V0_19, logs.KV_TOO_SMALL, logs.ENGINE_DIED]))
def test_where_the_bytes_are_split_does_not_matter(size: int, text: str) -> None:
    data, reader = text.encode(), StartupLog()
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    whole = read(text)
    assert (reader.facts, reader.failure, reader.phase) == (whole.facts, whole.failure, whole.phase)
