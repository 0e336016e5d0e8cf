"""Command lines of vLLM as people keep them."""

from __future__ import annotations

import pytest

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.deployment.vllm_flags import (
    CommandLine,
    parse_command,
    process_command,
    with_config_file,
)

SCRIPT = """#!/bin/sh
# the server
export HF_HUB_OFFLINE=1
exec numactl -N 0 /opt/venv/bin/vllm serve meta-llama/Llama-3.1-8B-Instruct \\
    --max-num-seqs 128 --max_model_len=8k -tp 2 \\
    --no-enable-chunked-prefill --kv-cache-memory-bytes 2G \\
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
"""


def read(text: str) -> CommandLine:
    return parse_command(text, origin="run.sh")


def test_a_shell_script() -> None:
    launch = read(SCRIPT)
    assert launch.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert launch.count("--max-num-seqs") == 128
    assert launch.count("--max-model-len") == 8000
    assert launch.count("--tensor-parallel-size") == 2
    assert launch.number("--kv-cache-memory-bytes") == 2 * 1024**3
    assert launch.switched("enable-chunked-prefill") is False
    assert launch.switched("enable-prefix-caching") is None
    assert launch.text("--speculative-config") == '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve --model m --max-num-seqs 8",
        "python3 -m vllm.entrypoints.openai.api_server --model=m --max-num-seqs=8",
        "--model m --max-num-seqs 8",
        "docker run vllm/vllm-openai\nvllm serve m --max-num-seqs 8",
    ],
)
def test_ways_to_write_it(text: str) -> None:
    assert (read(text).model, read(text).count("--max-num-seqs")) == ("m", 8)


def test_a_switch_before_the_model_takes_it_for_its_value() -> None:
    # As argparse does: only the order tells a switch's value from the model.
    assert read("vllm serve m --enforce-eager").flags == {"--enforce-eager": ""}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no vLLM command line"),
        ("sglang serve m", "no vLLM command line"),
    ],
)
def test_what_is_no_command_line(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=rf"run\.sh: {says}"):
        read(text)


def test_a_value_that_is_no_number() -> None:
    launch = read("vllm serve m --max-num-seqs many --max-model-len ${LEN:-4096}")
    assert launch.count("--max-num-seqs") is None
    assert launch.unreadable("--max-num-seqs")
    assert launch.unreadable("--max-model-len")
    assert not launch.absent("--max-num-seqs")


def test_a_number_beyond_all_counts() -> None:
    assert read(f"vllm serve m --max-num-seqs {'9' * 26}").count("--max-num-seqs") is None


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --max-num-seqs 8; echo done",
        "# it's ours\ncat <<EOF\nit's\nEOF\nvllm serve m --max-num-seqs 8",
        "vllm serve m \\\n  --speculative-config '{\n\"a\": 1}' \\\n --max-num-seqs 8",
        "docker run --gpus all -v /vllm:/vllm vllm/vllm-openai:v0.9 --model m --max-num-seqs 8",
        "cat > run.sh <<'EOF'\nvllm serve m --max-num-seqs 8\nEOF",
        "don't forget:\nvllm serve m --hf-overrides '{\"a\": 1}' --max-num-seqs 8",
        "vllm serve m --hf-overrides '{\"a\": 1}' --max-num-seqs 8  # it's ours",
    ],
)
def test_scripts_as_people_write_them(text: str) -> None:
    assert (read(text).model, read(text).count("--max-num-seqs")) == ("m", 8)


@pytest.mark.parametrize("more", ["--config serve.yaml", "$ARGS", '"$@"'])
def test_flags_that_stand_elsewhere(more: str) -> None:
    launch = read(f"vllm serve m --max-num-seqs 8 {more}")
    assert not launch.complete
    assert not launch.absent("--max-model-len")


def test_short_names() -> None:
    launch = read("vllm serve m -tp 2 -ep -sc '{}'")
    assert set(launch.flags) == {
        "--tensor-parallel-size", "--enable-expert-parallel", "--speculative-config"
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/python3 /usr/local/bin/vllm serve org/m -tp 2",
        "vllm serve org/m --tensor-parallel-size=2",
        "/opt/venv/bin/vllm serve org/m --tensor_parallel_size 2",
        "python3.12 -u -X dev -m vllm.entrypoints.openai.api_server --model org/m --tp 2",
        "python -m vllm serve org/m -tp 2",
        "python /x/vllm/entrypoints/openai/api_server.py --model org/m -tp 2",
    ],
)
def test_arguments_of_a_process_that_serves_vllm(line: str) -> None:
    launch = process_command(line.split())
    assert launch is not None
    assert (launch.model, launch.count("--tensor-parallel-size")) == ("org/m", 2)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "bash -c vllm serve org/m",
        "nginx vllm serve org/m",
        "python3 -c vllm serve org/m",
        "python3 app.py vllm serve org/m",
        "python3 -m http.server vllm serve org/m",
        "python3 -m vllm bench serve",
        "vllm bench serve",
        "vllmx serve org/m",
        "pythonic -m vllm serve org/m",
        "python3 -m",
        "python3",
    ],
)
def test_arguments_of_another_program(line: str) -> None:
    assert process_command(line.split()) is None


def test_a_configuration_file_adds_flags_under_the_line() -> None:
    launch = process_command(["vllm", "serve", "--config", "f.yaml", "--max-num-seqs", "8"])
    assert launch is not None
    document = {"model": "org/m", "max-num-seqs": 64, "enable_lora": True, "kv-transfer": {"a": 1}}
    whole = with_config_file(launch, document)
    assert (whole.model, whole.complete, whole.count("--max-num-seqs")) == ("org/m", True, 8)
    assert whole.switched("enable-lora") is True
    assert whole.flags["--kv-transfer"] == '{"a": 1}'
    assert not with_config_file(launch, {"enable-prefix-caching": False}).complete
