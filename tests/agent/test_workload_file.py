"""The stated workload from a file to what is said, as users run it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.report.history import stated_of
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.targets import table_specs
from kneewatch.diagnose.lengths import PROMPTS
from tests.agent.running import Main
from tests.diagnose.workloads import PROFILE, lengths_table
from tests.recordings import CAPTURES

OVERLOAD = str(CAPTURES / "queue_overload.jsonl.gz")


def with_tokens(text: str, tokens: Mapping[int, int]) -> str:
    """The profile with other percentiles."""
    for stated, other in tokens.items():
        text = text.replace(f"tokens = {stated}\n", f"tokens = {other}\n")
    return text


FAR = with_tokens(PROFILE, {200: 60, 500: 100, 900: 120})
"""As long as the recorded answers; the prompts are shorter."""

FITS = with_tokens(FAR, {1000: 60, 4000: 100, 8000: 120})


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path) -> None:
    (tmp_path / "fits.toml").write_text(FITS)
    (tmp_path / "far.toml").write_text(FAR)
    (tmp_path / "typo.toml").write_text(PROFILE.replace("input_p95_tokens", "input_p95"))
    (tmp_path / "deep.toml").write_text(f"name = {'[' * 5000}")


def replayed(main: Main, *flags: str) -> list[dict[str, Any]]:
    done = main("replay", OVERLOAD, "--window", "15s", "--format", "json", *flags)
    return done.documents


def told(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [c for document in documents for c in document["causes"] if c["id"] == "workload_drift"]


def test_a_profile_that_fits_says_nothing(main: Main) -> None:
    documents = replayed(main, "--workload-profile", "fits.toml", "--replicas", "1")
    assert told(documents) == []
    assert documents[-1]["signals"]["prompt_tokens_shift_ratio"] < 0.05
    assert documents[-1]["signals"]["arrival_peak_ratio"] == pytest.approx(0.49, abs=0.02)


def test_a_profile_that_is_far_off_is_told(main: Main) -> None:
    documents = replayed(main, "--workload-profile", "far.toml")
    cause = told(documents)[-1]
    assert cause["severity"] == "info"
    assert cause["summary"].endswith("sizing profile: prompts are shorter.")
    (unless,) = cause["unless"]
    assert unless["signal"] == "prompt_tokens_shift_ratio"
    assert 0 < unless["at"] < unless["now"] == 0.5
    alone = [
        [c for c in document["causes"] if c["id"] != "workload_drift"] for document in documents
    ]
    ids = [[c["id"] for c in causes] for causes in alone]
    assert ids == [[c["id"] for c in document["causes"]] for document in replayed(main)], (
        "all else is as ever"
    )


def test_the_text_says_what_to_do(main: Main) -> None:
    out = main("replay", OVERLOAD, "--window", "15s", "--workload-profile", "far.toml").out
    assert "workload_drift" in out
    assert "kneewatch size --plan far.toml" in out
    assert "set replicas" in out


def test_the_shipped_example_is_one(main: Main) -> None:
    assert told(replayed(main, "--workload-profile", "example"))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("typo.toml", "typo.toml: unknown key lengths.input_p95; did you mean input_p95_tokens?"),
        ("none.toml", "none.toml does not exist"),
        ("deep.toml", "deep.toml: is nested too deeply"),
        (".", ". cannot be read: not a regular file"),
    ],
)
def test_what_cannot_be_is_said(main: Main, path: str, says: str) -> None:
    done = main("replay", OVERLOAD, "--workload-profile", path)
    assert done.status == 2
    assert done.err == f"kneewatch: flag --workload-profile: {says}\n"


def settings(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "k.toml").write_text(text)
    return load(file=tmp_path / "k.toml", environ={}, flags={})


def test_a_target_may_have_its_own(tmp_path: Path) -> None:
    far, fits = tmp_path / "far.toml", tmp_path / "fits.toml"
    stated = settings(
        tmp_path,
        f'workload_profile = "{far}"\n[[targets]]\nurl = "a"\nname = "a"\n'
        f'[[targets]]\nurl = "b"\nname = "b"\nworkload_profile = "{fits}"\n',
    )
    bases = {spec.name: target_profile(spec.settings) for spec in table_specs(stated)}
    workloads = {name: basis.stated.workload for name, basis in bases.items()}
    medians = {
        name: workload.lengths(None, None)[PROMPTS][0].most
        for name, workload in workloads.items()
        if workload
    }
    assert medians == {"a": 1000.0, "b": 60.0}


SIZED = f"""
{lengths_table((900, 1500, 2000, 1000), (180, 350, 500))}
[traffic]
kind = "online"
archetype = "rag"
peak_requests_per_s = 120
[slo]
ttft_p99_s = 2.0
[prefix]
shared_tokens = 500
[deployment]
model = "meta-llama/Llama-3.3-70B-Instruct"
gpus = ["h100-sxm"]
tensor_parallel = 4
final_benchmark = "curve.csv"
benchmark_gpu_ratio = 0.7
"""


def test_a_plan_is_written_as_settings_of_the_daemon(main: Main, tmp_path: Path) -> None:
    (tmp_path / "sized.toml").write_text(SIZED)
    curve = "concurrency,requests_per_s,ttft_p99_s,itl_p99_s\n32,9.5,1.1,0.022\n48,12,2.0,0.028\n"
    (tmp_path / "curve.csv").write_text(curve + "64,14.5,3.6,0.036\n")
    done = main("size", "--plan", "sized.toml", "--format", "toml")
    stated = settings(tmp_path, done.out)
    assert "queued requests, HTTP 429 beyond: " in done.out
    keys = ("replicas", "slo.ttft_p99_s", "benchmark.requests_per_s", "benchmark.itl_p99_s")
    assert [stated[key] for key in keys] == [15, 2.0, 12, 0.028]
    assert stated["benchmark.gpu_ratio"] == 0.7
    assert stated["expect.prefix_hit_ratio"] == pytest.approx(0.8 * 500 / 1000)
    assert stated["workload_profile"] == str(tmp_path / "sized.toml")
    assert main("size", "--model", "llama-3.1-8b", "--format", "toml").status == 2


def test_each_fleet_of_a_plan_has_settings_of_its_own(main: Main, tmp_path: Path) -> None:
    pools = SIZED.replace('tensor_parallel = 4\nfinal_benchmark = "curve.csv"\n', "")
    pools = pools.replace("ttft_p99_s = 2.0", "ttft_p99_s = 3.0\nitl_p99_s = 0.05")
    pools = re.sub(r"(input_\w+_tokens = \d+)", r"\g<1>0", pools)
    (tmp_path / "pools.toml").write_text(pools + '[hosting]\nnetwork = "infiniband-ndr"\n')
    done = main("size", "--plan", "pools.toml", "--format", "toml")
    prefill, decode = table_specs(settings(tmp_path, done.out))
    assert (prefill.name, decode.labels) == ("prefill", {"tier": "decode"})
    keys = ("slo.ttft_p99_s", "slo.itl_p99_s", "workload_profile")
    assert [prefill.settings[key] for key in keys] == [3.0, None, None]
    assert [decode.settings[key] for key in keys] == [None, 0.05, None]
    plan = json.loads(main("size", "--plan", "pools.toml", "--format", "json").out)["plan"]
    fleet = next(step["output"] for step in plan["steps"] if step["number"] == 11)
    planned = [fleet[f"{each.name}.instances"] for each in (prefill, decode)]
    assert [each.settings["replicas"] for each in (prefill, decode)] == planned


def test_a_report_takes_it_too_unless_it_has_one(tmp_path: Path) -> None:
    far, fits = tmp_path / "far.toml", tmp_path / "fits.toml"
    stated = f'workload_profile = "{far}"\n'
    own = stated + f'report.profile = "{fits}"\n'
    for text, p95 in ((stated, 4000.0), (own, 100.0)):
        workload = stated_of(settings(tmp_path, text))("any").workload
        assert workload is not None
        assert workload.lengths.input_p95_tokens == p95
