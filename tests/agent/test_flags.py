"""Each row of flags.toml is read from a command line, and reaches sizing, help and HTTP."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from msgspec import convert
from msgspec.structs import fields as fields_of

from kneewatch.agent.api.openapi import size_inputs
from kneewatch.agent.cli import size_command
from kneewatch.agent.size_command import ignored_flags, with_launch
from kneewatch.agent.size_options import FLAGS as OF_SIZE
from kneewatch.diagnose.deployment.server_facts import launch_values
from kneewatch.diagnose.deployment.vllm_flags import FLAGS, VLLM, Flag, Launch, parse_launch
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.plan import workload_profile

VALUES = {"count": "3", "number": "0.5", "gib": "2", "switch": "", "text": "float32"}
READ = {"count": 3, "number": 0.5, "gib": 2, "switch": True, "text": "float32"}
UNSET = {flag.parameter: flag.default for flag in OF_SIZE}


def launched(name: str, flag: Flag) -> Launch:
    """A command line with a flag, by one of its spellings."""
    return parse_launch(f"vllm serve m {name} {VALUES[flag.kind]}".strip(), origin="test")


@pytest.mark.parametrize("flag", VLLM.values(), ids=lambda flag: flag.launch)
def test_a_row_is_read_from_a_command_line_and_counted_or_named(flag: Flag) -> None:
    for name in (flag.launch, *flag.short):
        launch = launched(name, flag)
        assert flag.read(launch) == READ[flag.kind]
        assert bool(ignored_flags(launch)) != bool(flag.help) or not flag.may_change
    assert flag.help or flag.since or flag.shown or flag.may_change, "the row has no use"


@pytest.mark.parametrize("flag", OF_SIZE, ids=lambda flag: flag.name)
def test_a_row_of_size_is_in_help_http_and_the_launch(flag: Flag) -> None:
    assert flag.parameter in {option.name for option in size_command.params}
    assert flag.names_file != (flag.parameter in size_inputs()["properties"])
    if flag.launch and flag.parameter not in ("max_loras", "max_lora_rank"):
        given = with_launch(UNSET | {"launch": f"vllm serve m {flag.launch} {VALUES[flag.kind]}"})
        assert given[flag.parameter] == READ[flag.kind]
    if flag.setup:
        assert flag.setup in {field.name for field in fields_of(Setup)}
    if flag.profile:
        table, _, key = flag.profile.partition(".")
        record: Any = get_type_hints(workload_profile.WorkloadProfile)[table]
        assert key in {field.name for field in fields(record)}


def test_facts_are_those_of_rows_that_are_shown() -> None:
    words = " ".join(f"{name} {VALUES[flag.kind]}" for name, flag in VLLM.items())
    facts = launch_values(parse_launch(f"vllm serve m {words} --api-key x", origin="test"))
    shown = {flag.launch for flag in FLAGS if flag.launch and (flag.shown or flag.help)}
    assert "kv_transfer_config" not in facts
    assert "api_key" not in facts
    assert {"cpu_offload_gb", "async_scheduling"} <= facts.keys()
    assert len(facts) <= len(shown) + 1


def test_a_row_with_an_unknown_column_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        convert({"name": "--x", "helps": "?"}, Flag)
