"""The whole command after a change: what runs, what the change marks, and what is not shown."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import NOTHING, Reported
from kneewatch.diagnose.deployment.vllm_flags import CommandLine, parse_command
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, ServeCommand
from kneewatch.diagnose.recommend.serve_command import serve_command
from kneewatch.reports.advice_text import command_rows
from tests.diagnose.recommend.scenes import LLAMA, advised

SEATS = FlagChange("--max-num-seqs", 256, 96)


def after(line: str, *changes: FlagChange) -> ServeCommand:
    command = serve_command(parse_command(line, origin="run.sh"), "", changes)
    assert command is not None
    return command


@pytest.mark.parametrize(
    ("line", "change", "becomes"),
    [
        ("m -tp 2 --max-num-seqs 256 --port 8001", SEATS,
         "m --tensor-parallel-size 2 --max-num-seqs 96 --port 8001"),
        ("m --port 8001", SEATS, "m --port 8001 --max-num-seqs 96"),
        ("m --no-enable-prefix-caching", FlagChange("--no-enable-prefix-caching", True, None), "m"),
        ("m --no-enable-prefix-caching", FlagChange("--enable-prefix-caching", False, True),
         "m --enable-prefix-caching"),
        ("m --enable-prefix-caching", FlagChange("--enable-prefix-caching", True, False),
         "m --no-enable-prefix-caching"),
        ("""m -sc '{"method": "ngram", "num_speculative_tokens": 4}'""",
         FlagChange("--speculative-config.num_speculative_tokens", 4, 1),
         """m --speculative-config '{"method": "ngram", "num_speculative_tokens": 1}'"""),
    ],
)  # fmt: skip
def test_known_flags_are_kept_and_the_changed_one_is_replaced(
    line: str, change: FlagChange, becomes: str
) -> None:
    command = after(f"vllm serve {line}", change)
    assert command.line == f"vllm serve {becomes}"
    assert command.unknown == ()
    (marked,) = command.changed or command.removed
    assert (marked in command.line) == bool(command.changed)


def test_values_that_may_be_secrets_are_not_shown() -> None:
    command = after("vllm serve m --api-key sk-123 --swap-space 4 --max-num-seqs 256", SEATS)
    assert "sk-123" not in str(command)
    assert command.line == 'vllm serve m --api-key "$API_KEY" --swap-space 4 --max-num-seqs 96'
    assert command.unknown == ("the value of --api-key, which may be a secret: set API_KEY to it",)


def test_what_the_present_command_does_not_say() -> None:
    command = after('vllm serve m --max-model-len $LEN --lora-modules a=x b=y "$@"', SEATS)
    assert "flags that are set elsewhere" in command.unknown[0]
    assert any("--max-model-len" in words for words in command.unknown)
    assert "further values of --lora-modules" in command.unknown


def test_no_flag_no_command() -> None:
    launch = CommandLine("m")
    assert serve_command(launch, "", [FlagChange("replicas", 1, 2)]) is None
    assert serve_command(CommandLine(), "", [SEATS]) is None
    named = serve_command(CommandLine(), "org/m", [SEATS])
    assert named is not None
    assert named.line == "vllm serve org/m --max-num-seqs 96"


@given(st.dictionaries(st.sampled_from(["--host", "--revision", "--dtype"]), st.text(min_size=1)))
def test_a_shell_reads_the_values_that_vllm_got(flags: dict[str, str]) -> None:
    command = serve_command(CommandLine("m", flags), "", [SEATS])
    assert command is not None
    assert parse_words(shlex.split(command.line)) == {**flags, "--max-num-seqs": "96"}


def parse_words(words: list[str]) -> dict[str, str]:
    assert words[:3] == ["vllm", "serve", "m"]
    read: dict[str, str] = {}
    rest = iter(words[3:])
    for word in rest:
        flag, equals, value = word.partition("=")
        read[flag] = value if equals else next(rest)
    return read


LAUNCHED = replace(
    LLAMA,
    command_line=CommandLine(
        "meta-llama/Llama-3.1-8B-Instruct", {"--gpu-memory-utilization": "0.9"}
    ),
    reported=Reported(start_s=240.0),
)


def best(*, stated: object = LAUNCHED) -> Advice:
    recommendations = advised("kv_pressure", stated=stated)  # type: ignore[arg-type]
    return recommendations["kv-fp8"]


def test_a_verdict_has_the_command_and_what_the_restart_costs() -> None:
    command = best().command
    assert command is not None
    assert command.line.endswith("--gpu-memory-utilization 0.9 --kv-cache-dtype fp8")
    assert (command.restart_at_least_s, command.lost_requests) == (240, 160)
    rows = command_rows(best())
    assert rows[0] == f"run: {command.line}"
    assert "changed: --kv-cache-dtype fp8" in rows
    assert "at least 4 min" in rows[-1]
    assert "ends 160 requests unless drained" in rows[-1]


def test_a_server_in_a_pod_gets_the_args_of_its_container() -> None:
    line = parse_command("vllm serve m --api-key $KEY --served-model-name 'a b'", origin="f")
    stated = replace(LAUNCHED, command_line=line, reported=Reported(in_pod=True))
    (row,) = [row for row in command_rows(best(stated=stated)) if "container's args" in row]
    assert row == (
        'as the container\'s args: ["m", "--api-key", "$(API_KEY)", "--served-model-name", "a b", '
        '"--kv-cache-dtype", "fp8"]'
    )
    assert not any("container's args" in row for row in command_rows(best()))


def test_without_a_known_launch_no_command_is_made_up() -> None:
    assert best(stated=NOTHING).command is None
    assert command_rows(best(stated=NOTHING)) == []
