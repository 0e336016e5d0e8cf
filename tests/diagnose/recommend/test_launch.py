"""Command lines of vLLM as people keep them."""

from __future__ import annotations

import pytest

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.deployment.vllm_flags import Launch, parse_launch

SCRIPT = """#!/bin/sh
# the server
export HF_HUB_OFFLINE=1
exec numactl -N 0 /opt/venv/bin/vllm serve meta-llama/Llama-3.1-8B-Instruct \\
    --max-num-seqs 128 --max_model_len=8k -tp 2 \\
    --no-enable-chunked-prefill --kv-cache-memory-bytes 2G \\
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
"""


def read(text: str) -> Launch:
    return parse_launch(text, origin="run.sh")


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
