"""Sweeps at several tensor-parallel degrees, from files to a diagnosis and to a size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from kneewatch.agent.stated_deployment import sweeps_of
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.benchmark.operating_point import compared, degrees_of
from kneewatch.reports.json_schemas import schema as schema_of
from kneewatch.rules.facts import NO_TARGETS
from tests.agent.running import Main
from tests.diagnose.sizing.test_benchmark import AIPERF, VLLM, guidellm_run
from tests.recordings import CAPTURES

HEALTHY = str(CAPTURES / "healthy_light.jsonl.gz")
SIZE_SCHEMA = schema_of("size")
FLAG = "--benchmark-by-tensor-parallel"


def csv_of(*rows: tuple[float, float, float]) -> str:
    """Rows of concurrency, output tokens a second and TTFT P99 in ms; 200 tokens a request."""
    lines = [f"{c},{tokens / 200},{ms},30,{tokens}" for c, tokens, ms in rows]
    return "\n".join(["concurrency,rps,ttft_p99_ms,itl_p99_ms,output_tokens_per_s", *lines])


ONE = csv_of((8, 500, 200), (64, 1000, 900), (80, 1000, 2400))
FOUR = csv_of((32, 1000, 200), (256, 2000, 900), (320, 2000, 2400))


@pytest.fixture
def named(tmp_path: Path) -> tuple[str, ...]:
    """The flags of two sweeps, of which four GPUs give half as much each."""
    for name, text in (("one.csv", ONE), ("four.csv", FOUR)):
        (tmp_path / name).write_text(text)
    return (FLAG, f"1={tmp_path / 'one.csv'}", FLAG, f"4={tmp_path / 'four.csv'}")


def csv_at(gpus: int) -> str:
    """The table of a degree."""
    return ONE if gpus == 1 else FOUR


def vllm_at(gpus: int) -> str:
    """What `vllm bench serve` writes of one load, with so many times the load and tokens a GPU."""
    tokens = 2400.0 * gpus / (1 if gpus == 1 else 2)
    figures = {"output_throughput": tokens, "request_throughput": tokens / 200}
    return json.dumps({**VLLM, **figures, "max_concurrency": 48 * gpus})


def guidellm_at(gpus: int) -> str:
    run = guidellm_run({"type_": "concurrent", "streams": 8 * gpus})
    metrics: dict[str, object] = dict(run["metrics"])  # type: ignore[call-overload]
    tokens = 600.0 * gpus / (1 if gpus == 1 else 2)
    metrics["output_tokens_per_second"] = {"successful": {"mean": tokens}}
    metrics["requests_per_second"] = {"successful": {"mean": tokens / 200}}
    return json.dumps({"benchmarks": [{**run, "metrics": metrics}]})


def aiperf_at(gpus: int) -> str:
    times = gpus / (1 if gpus == 1 else 2)
    figures: dict[str, object] = {
        "request_throughput": {"unit": "requests/sec", "avg": 2.0 * times},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 1100.0 * times},
        "input_config": {"phases": [{"name": "profiling", "concurrency": 16 * gpus}]},
    }
    return json.dumps({**AIPERF, **figures})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(csv_at, id="CSV"),
        pytest.param(vllm_at, id="vllm bench serve"),
        pytest.param(guidellm_at, id="guidellm"),
        pytest.param(aiperf_at, id="aiperf"),
    ],
)
def test_every_tools_files_are_read(text: Callable[[int], str], tmp_path: Path) -> None:
    """Four GPUs give twice what one gives, at as many requests in flight a GPU."""
    paths = {str(gpus): tmp_path / f"tp{gpus}" for gpus in (4, 1)}
    for gpus, path in paths.items():
        path.write_text(text(int(gpus)))
    sweeps = sweeps_of((gpus, str(path)) for gpus, path in paths.items())
    unit, degrees = degrees_of(sweeps, NO_TARGETS)
    assert unit == "tokens"
    assert compared(unit, degrees, 4).share_ratio == pytest.approx(0.5)


def test_a_file_for_each_load_is_named_by_a_pattern(tmp_path: Path) -> None:
    for load in (8, 16, 48):
        (tmp_path / f"c{load}.json").write_text(json.dumps({**VLLM, "max_concurrency": load}))
    (benchmark,) = sweeps_of([("2", str(tmp_path / "c*.json"))]).values()
    assert [point.concurrency for point in benchmark.points] == [8, 16, 48]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ([("four", "x")], "'four' is not a tensor-parallel degree"),
        ([("0", "x")], "'0' is no"),
        ([("4096", "x")], "'4096' is no"),
        ([("4", "one.csv"), ("04", "one.csv")], "'04' is named twice"),
        ([("4", "no.csv")], "TP 4: no.csv does not exist"),
        ([("4", "bad.csv")], "TP 4: bad.csv: no column for requests_per_s"),
        ([("4", "*.json")], "TP 4: *.json matches 0 files"),
    ],
)
def test_what_cannot_be_a_sweep_is_named(
    named: list[tuple[str, str]], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text(ONE)
    Path("bad.csv").write_text("concurrency,ttft_p99_ms,itl_p99_ms\n8,200,30\n")
    with pytest.raises(SizingError) as refused:
        sweeps_of(named)
    assert says in str(refused.value)


def test_a_recording_is_held_against_the_sweeps(main: Main, named: tuple[str, ...]) -> None:
    flags = (HEALTHY, "--tensor-parallel", "4", *named)
    ended = main("replay", *flags)
    assert ended.status == 0, "a note is no finding"
    assert "tp_overhead (info" in ended.out
    assert "In the benchmark TP 4 reached 500 tokens/s per GPU, TP 1 1,000" in ended.out
    assert "S5 throughput per GPU falls" in ended.out
    last = main("replay", *flags, "--format", "json").documents[-1]
    assert last["health"] == "info"
    assert [cause["id"] for cause in last["causes"]] == ["tp_overhead"]


def test_a_recording_on_the_smaller_degree_is_well(main: Main, named: tuple[str, ...]) -> None:
    assert "tp_overhead" not in main("replay", HEALTHY, "--tensor-parallel", "1", *named).out
    unstated = main("replay", HEALTHY, *named).out
    assert "tp_overhead (info" not in unstated


def test_the_settings_file_names_sweeps(main: Main, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text(ONE)
    (tmp_path / "four.csv").write_text(FOUR)
    path = tmp_path / "kneewatch.toml"
    path.write_text(
        'tensor_parallel = 4\n[benchmark.by_tensor_parallel]\n1 = "one.csv"\n4 = "four.csv"\n'
    )
    assert "tp_overhead" in main("replay", HEALTHY, "--config", path).out
    assert '"4" = "four.csv"' in main("config", "--config", path).out
    path.write_text('[benchmark.by_tensor_parallel]\n4 = "gone.csv"\n')
    ended = main("replay", HEALTHY, "--config", path)
    assert (ended.status, ended.out) == (2, "")
    for said in (str(path), "benchmark.by_tensor_parallel", "TP 4", "gone.csv"):
        assert said in ended.err


def test_a_degree_that_is_given_twice_is_refused(main: Main, named: tuple[str, ...]) -> None:
    ended = main("replay", HEALTHY, *named, FLAG, "4=other.csv")
    assert ended.status == 2
    assert f"{FLAG}: 4 is given twice" in ended.err


def test_a_size_compares_the_degrees(main: Main, named: tuple[str, ...]) -> None:
    """One GPU at 3 USD/h and 1,000 tokens/s: 0.83 USD a million; the usable RPS is TP 4's own."""
    flags = (
        "size", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "l40s", "--tp", "4",
        "--ttft-slo", "1s", "--usd-per-gpu-hour", "3", *named,
    )  # fmt: skip
    document = json.loads(main(*flags, "--format", "json").out)
    jsonschema.validate(document, SIZE_SCHEMA)
    by_degree = document["benchmark_by_tensor_parallel"]
    assert by_degree["cheapest_tensor_parallel"] == 1
    assert [row["usd_per_million_output_tokens"] for row in by_degree["degrees"]] == [
        0.8333,
        1.6667,
    ]
    assert [row["scaling_efficiency_ratio"] for row in by_degree["degrees"]] == [1.0, 0.5]
    assert document["inputs"]["usable_requests_per_s"] == 10
    text = main(*flags).out
    assert "cheapest: TP 1" in text
    assert "TP 4 has 50% less throughput per GPU than TP 1" in text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--search",), "--benchmark-by-tensor-parallel"),
        (("--pp", "2"), "--pp: sweeps by tensor parallel size need a pipeline size of 1"),
        ((FLAG, "1=again.csv"), "--benchmark-by-tensor-parallel: '1' is named twice"),
    ],
)
def test_what_a_size_cannot_do_with_sweeps(
    more: tuple[str, ...], says: str, main: Main, named: tuple[str, ...]
) -> None:
    flags = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "l40s")
    ended = main("size", *flags, *named, *more, "--input-tokens", "100", "--output-tokens", "10")
    assert ended.status == 2
    assert says in ended.err
