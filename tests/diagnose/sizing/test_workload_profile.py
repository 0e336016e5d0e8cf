"""Workload profiles: what is read, and what is refused by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.sizing.plan.workload_profile import (
    DeploymentTable,
    TierProfile,
    TokenLengths,
    WorkloadProfile,
    example_profile,
    read_profile,
)
from tests.diagnose.workloads import SMALLEST

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "plan.md"


def changed(old: str, new: str) -> str:
    assert old in SMALLEST
    return SMALLEST.replace(old, new)


def test_what_is_left_out_is_not_known() -> None:
    profile = read_profile(SMALLEST)
    assert profile.slo.ttft_p99_s is None
    assert profile.traffic.average_requests_per_s is None
    assert "quantization" not in profile.deployment.flags
    assert (profile.prefix, profile.lora, profile.speculation, profile.tiers) == (
        None,
        None,
        None,
        (),
    )
    assert profile.hosting.node_gpus == 8


def test_the_packaged_example_is_a_profile() -> None:
    profile = read_profile(example_profile(), origin="example")
    assert [tier.name for tier in profile.tiers] == ["small", "large"]
    assert profile.tiers[1].model == profile.deployment.model
    assert profile.benchmark_files == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "lengths is missing", id="empty"),
        pytest.param("a = [", "profile: ", id="no TOML"),
        pytest.param(
            SMALLEST + "[trafic]\n",
            "unknown key trafic; did you mean traffic",
            id="unknown table",
        ),
        pytest.param(
            changed("peak_requests_per_s", "peak_request_per_s"),
            r"unknown key traffic\.peak_request_per_s; did you mean peak_requests_per_s\?",
            id="unknown key",
        ),
        pytest.param(
            changed("input_p99_tokens = 8000", ""),
            r"lengths\.input_p99_tokens is missing",
            id="miss",
        ),
        pytest.param(
            changed("input_p95_tokens = 4000", "input_p95_tokens = 900"),
            "lengths.input_p95_tokens is 900, below input_p50_tokens of 1000",
            id="percentiles fall",
        ),
        pytest.param(
            changed("input_p50_tokens = 1000", "input_p50_tokens = 10.5"),
            r"lengths\.input_p50_tokens: Expected `int`, got `float`",
            id="half a token",
        ),
        pytest.param(
            changed("= 120", "= -1"),
            r"traffic\.peak_requests_per_s: Expected `int` >= 1",
            id="negative",
        ),
        pytest.param(changed("= 120", "= nan"), "Expected `float` > 0.0", id="nan"),
        pytest.param(changed("= 120", "= true"), "got `bool`", id="flag"),
        pytest.param(
            changed('"chat"', '"chatty"'),
            r"traffic\.archetype: Expected .*\(chat\|rag\|code\|agentic\)",
            id="choice",
        ),
        pytest.param(
            changed('["h100-sxm"]', '"h100-sxm"'),
            r"deployment\.gpus: Expected `array`, got `str`",
            id="no list",
        ),
        pytest.param(
            changed('["h100-sxm"]', '["l4", " "]'),
            r"deployment\.gpus\[2\]: Expected `str`",
            id="empty name",
        ),
        pytest.param(
            changed('"chat"', "2026-11-22"),
            r"traffic\.archetype: Expected `str`, got `date`",
            id="date",
        ),
        pytest.param(
            changed("= 120", "= inf"), "Expected `float` <= 1000000000000000.0", id="infinite"
        ),
        pytest.param(
            f"{SMALLEST}max_num_seqs = true", "deployment.max_num_seqs is True", id="flag"
        ),
        pytest.param(
            f"{SMALLEST}tensor_paralel = 2", "did you mean tensor_parallel?", id="unknown flag"
        ),
        pytest.param(
            f"{SMALLEST}max_model_len = 0",
            "is 0; it must be a whole number above 0",
            id="no tokens",
        ),
        pytest.param(f"{SMALLEST}flags = {{ x = 1 }}", "keys of the table itself", id="flags"),
        pytest.param(changed('["h100-sxm"]', "[]"), "`array` of length >= 1", id="empty list"),
        pytest.param(
            SMALLEST + "[slo]\nttft_p99_s = 2000\n", "`float` <= 600.0", id="milliseconds?"
        ),
        pytest.param(SMALLEST + "[[prefix]]\n", r"prefix: Expected", id="list of tables"),
        pytest.param("name = 3\n" + SMALLEST, r"name: Expected `str`, got `int`", id="name"),
        pytest.param(
            changed("peak_requests_per_s = 120", ""), "traffic.peak_requests_per_s", id="no peak"
        ),
        pytest.param(
            changed("= 120", "= 120\naverage_requests_per_s = 130"),
            "traffic.peak_requests_per_s is 120, below average_requests_per_s of 130",
            id="peak below average",
        ),
        pytest.param(
            changed("= 120", "= 120\nbatch_requests = 5"), "go with kind 'batch'", id="batch key"
        ),
        pytest.param(
            SMALLEST + "[prefix]\nshared_tokens = 9000\n", "above the mean input", id="long prefix"
        ),
        pytest.param(
            SMALLEST + "[lora]\nadapters = 4\nmax_simultaneous_adapters = 8\nadapter_bytes = 1e8\n",
            "above the 4 adapters",
            id="adapters",
        ),
        pytest.param(
            SMALLEST + "[lora]\nadapters = 4\nmax_simultaneous_adapters = 2\n",
            "set max_lora_rank, or adapter_bytes",
            id="neither rank nor bytes",
        ),
        pytest.param(
            SMALLEST
            + "[lora]\nadapters = 4\nmax_simultaneous_adapters = 2\nmax_lora_rank = 8\n"
            + "adapter_bytes = 1e8\n",
            "set max_lora_rank, or adapter_bytes",
            id="both",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        read_profile(text)
    assert str(caught.value).startswith("profile: ")


TWO = '[[tiers]]\nname = "a"\n{first}\n[[tiers]]\nname = "b"\n{second}\n'


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        pytest.param(
            '[[tiers]]\nname = "a"\nshare_ratio = 1\n', "a single tier is not enough", id="one"
        ),
        pytest.param(
            TWO.format(first="share_ratio = 0.5", second="share_ratio = 0.4"),
            "share_ratio adds up to 0.9, not 1",
            id="traffic without a tier",
        ),
        pytest.param(
            TWO.format(first="share_ratio = 0.5", second=""),
            r"tiers\[2\].share_ratio is missing",
            id="no share",
        ),
        pytest.param(
            TWO.format(first="escalation_ratio = 0.5", second=""),
            "has no effect with routing.method 'route'",
            id="route escalates",
        ),
        pytest.param(
            '[routing]\nmethod = "cascade"\n'
            + TWO.format(first="escalation_ratio = 0.3", second="escalation_ratio = 0.3"),
            "the last tier has no next tier to escalate to",
            id="cascade without end",
        ),
        pytest.param(
            TWO.format(first="share_ratio = 0.5", second="share_ratio = 0.5").replace('"b"', '"a"'),
            "two tiers are called 'a'",
            id="twins",
        ),
        pytest.param(
            TWO.format(first="share_ratio = 0.5\ngpu = ['l4']", second="share_ratio = 0.5"),
            r"unknown key tiers\[1\]\.gpu; did you mean gpus",
            id="unknown key",
        ),
        pytest.param(
            TWO.format(
                first="share_ratio = 0.5\n[tiers.lengths]\ninput_p50 = 3",
                second="share_ratio = 0.5",
            ),
            r"unknown key tiers\[1\]\.lengths\.input_p50; did you mean input_p50_tokens",
            id="unknown length",
        ),
        pytest.param("tiers = 3\n", r"tiers: Expected `array`, got `int`", id="no table"),
    ],
)
def test_tiers_that_cannot_be(tables: str, message: str) -> None:
    text = tables + SMALLEST if tables.startswith("tiers") else SMALLEST + tables
    with pytest.raises(SettingsError, match=message):
        read_profile(text)


def test_a_batch_states_its_window_instead_of_a_peak() -> None:
    text = changed('"online"', '"batch"').replace(
        "peak_requests_per_s = 120", "batch_requests = 36000\nbatch_window_s = 3600"
    )
    assert read_profile(text).traffic.peak_requests_per_s is None
    with pytest.raises(SettingsError, match="batch_window_s is missing"):
        read_profile(text.replace("batch_window_s = 3600", ""))


def test_the_mean_is_that_of_the_log_normal_with_these_percentiles() -> None:
    lengths = read_profile(SMALLEST).lengths
    sigma = math.log(4000 / 1000) / 1.6449
    assert lengths.mean_input_tokens == pytest.approx(1000 * math.exp(sigma**2 / 2))
    stated = read_profile(changed("[traffic]", "input_mean_tokens = 1234\n[traffic]")).lengths
    assert stated.mean_input_tokens == 1234


@given(p50=st.integers(1, 10_000), more=st.integers(0, 100_000))
def test_an_estimated_mean_is_not_below_the_median(p50: int, more: int) -> None:
    lengths = TokenLengths(
        input_p50_tokens=p50,
        input_p95_tokens=p50 + more,
        input_p99_tokens=p50 + more,
        output_p50_tokens=1,
        output_p95_tokens=1,
        output_p99_tokens=1,
    )
    assert lengths.mean_input_tokens >= p50
    assert lengths.mean_output_tokens == 1


def test_every_key_is_documented_and_in_its_own_table() -> None:
    text = DOCS.read_text("utf-8")
    hints = get_type_hints(WorkloadProfile)
    shared = set(DeploymentTable.__struct_fields__)
    tables = {
        name: set((get_args(hint)[0] if get_args(hint) else hint).__struct_fields__) - {"flags"}
        for name, hint in hints.items()
        if name not in ("name", "tiers")
    }
    tables["tiers"] = set(TierProfile.__struct_fields__) - shared - {"lengths"}
    for table, keys in tables.items():
        head = rf"^(?:# )?\[+{table}\]+"
        part = re.search(rf"{head}(.*?)(?=^(?:# )?\[+[a-z_]+\]|\Z)", text, re.DOTALL | re.MULTILINE)
        assert part is not None, table
        missing = [key for key in keys if not re.search(rf"(?m)^(?:# )?{key} = ", part[1])]
        assert not missing, f"{table}: {missing}"


def test_all_values_that_contradict_others_are_named_at_once() -> None:
    crossed = SMALLEST.replace("output_p95_tokens = 500", "output_p95_tokens = 1")
    with pytest.raises(SettingsError) as caught:
        read_profile(crossed + "[lora]\nadapters = 4\nmax_simultaneous_adapters = 8\n")
    assert len(caught.value.messages) == 3
