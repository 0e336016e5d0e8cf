"""Benchmarks as text: the same points whichever tool wrote them, and errors that say where."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.benchmark.operating_point import achieved, matched
from kneewatch.diagnose.sizing.benchmark.reports import merged, read_benchmark
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.speed.performance import Load, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, costs

TABLE = """\
# vLLM 0.21, Llama-3 70B FP8, TP=4
concurrency,rps,ttft_p99_ms,itl_p99_ms
48,12,1900,30
8,3,300,20
"""

VLLM = {
    "date": "20260101-000000",
    "backend": "vllm",
    "request_rate": "inf",
    "max_concurrency": 48,
    "duration": 83.3,
    "completed": 1000,
    "failed": 0,
    "total_input_tokens": 1_000_000,
    "total_output_tokens": 200_000,
    "request_throughput": 12.0,
    "output_throughput": 2400.0,
    "total_token_throughput": 14400.0,
    "mean_ttft_ms": 1020.0,
    "median_ttft_ms": 900.0,
    "p99_ttft_ms": 1900.0,
    "mean_tpot_ms": 15.0,
    "median_itl_ms": 14.0,
    "p99_itl_ms": 30.0,
}
"""Keys as `vllm bench serve --save-result` writes them."""

AIPERF = {
    "schema_version": "1.3",
    "aiperf_version": "0.10.0",
    "request_throughput": {"unit": "requests/sec", "avg": 2.156207775934887},
    "request_latency": {"unit": "ms", "avg": 6726.664069072916, "p99": 18625.4480323},
    "request_count": {"unit": "requests", "avg": 96.0},
    "time_to_first_token": {"unit": "ms", "avg": 230.1, "p50": 177.785533, "p99": 687.61987825},
    "inter_token_latency": {"unit": "ms", "avg": 11.85, "p50": 12.2459, "p99": 13.272469915788},
    "inter_chunk_latency": {"unit": "ms", "avg": 11.99, "p50": 9.0817813, "p99": 117.98615575277},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1172.145991694937},
    "input_config": {
        "phases": [
            {"name": "warmup", "exclude_from_results": True, "concurrency": 4},
            {"name": "profiling", "concurrency": 16},
        ]
    },
}
"""An RTX 5090: github.com/anud18/qwen36-vllm-aiperf-benchmark @d254ffc, nvfp4/5090/agent/c16."""


def guidellm_run(strategy: object) -> dict[str, object]:
    """One entry of guidellm's `benchmarks`."""
    return {
        "config": {"strategy": strategy},
        "metrics": {
            "request_totals": {"successful": 900, "errored": 3, "incomplete": 1, "total": 904},
            "requests_per_second": {"successful": {"mean": 3.0}},
            "request_concurrency": {"successful": {"mean": 7.5}},
            "request_latency": {"successful": {"mean": 2.5}},
            "output_tokens_per_second": {"successful": {"mean": 600.0}},
            "time_to_first_token_ms": {
                "successful": {"mean": 210.0, "median": 200.0, "percentiles": {"p99": 300.0}}
            },
            "inter_token_latency_ms": {
                "successful": {"mean": 12.0, "median": 11.0, "percentiles": {"p99": 20.0}}
            },
        },
    }


def test_a_table_is_read_in_seconds_and_sorted() -> None:
    """1900 ms are 1.9 s to the last bit: a target of 1.9 s is kept."""
    low, high = read_benchmark(TABLE).points
    assert (low.concurrency, low.requests_per_s, low.ttft_p99_s, low.itl_p99_s) == (8, 3, 0.3, 0.02)
    assert (high.concurrency, high.ttft_p99_s, high.origin) == (48, 1.9, "row 3")
    assert high.ttft_p50_s is None


@pytest.mark.parametrize(
    "header",
    [
        "concurrency,rps,ttft_p99_ms,itl_p99_ms",
        "Concurrency,RPS,TTFT P99 (ms),ITL P99 (ms)",
        "max_concurrency,request_throughput,p99_ttft_ms,p99_itl_ms",
        "Concurrent requests,req/s,P99 TTFT [ms],P99 ITL [ms]",
        "c,QPS,TTFT_P99_ms,itl.p99.ms",
    ],
)
def test_a_heading_is_its_words(header: str) -> None:
    (point,) = read_benchmark(f"{header}\n48,12,1900,30\n").points
    assert (point.concurrency, point.requests_per_s) == (48, 12)
    assert point.ttft_p99_s == pytest.approx(1.9)
    assert point.itl_p99_s == pytest.approx(0.03)


def test_what_sizing_has_no_use_for_is_left_alone() -> None:
    text = "model;concurrency;rps;ttft_p99_s;itl_p99_ms;failed\nQwen;8;3.5;0.3;20;\n\n"
    (point,) = read_benchmark("\ufeff" + text).points
    assert (point.requests_per_s, point.ttft_p99_s, point.itl_p99_s) == (3.5, 0.3, 0.02)
    assert point.failed is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the benchmark is empty"),
        ("# only a comment\n", "the benchmark is empty"),
        (TABLE.replace("1900", "fast"), "row 3, column 'ttft_p99_ms': 'fast' is not a number"),
        (TABLE.replace("1900", "-5"), "row 3: ttft_p99_s is -0.005; it must be above 0"),
        (TABLE.replace("48,12", "0,12"), "row 3: concurrency is 0; it must be above 0"),
        (TABLE.replace(",30", ""), "row 3 has 3 cells, the header 4"),
        (TABLE.replace("1900", ""), "row 3: no ttft_p99_ms"),
        (TABLE.replace("itl_p99_ms", "itl_p95_ms"), "no column for itl_p99_s among"),
        (TABLE.replace("itl_p99_ms", "itl_p99"), "no column for itl_p99_s among"),
        (TABLE.splitlines()[1], "the benchmark has no measured point"),
        ("c,rps,ttft p99 ms,itl p99 ms,ttft p50 ms\n1,1,100,9,200", "the median TTFT (0.2 s) is"),
        ("{", "line 1 is not JSON"),
        ("[1]", "document 1 is int, not an object"),
        ("[" * 100_000, "not usable JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not usable JSON"),
        (json.dumps(VLLM | {"p99_ttft_ms": 10**400}), "no p99_ttft_ms"),
        (TABLE.replace("1900", "1e999"), "row 3: no ttft_p99_ms"),
        (TABLE.replace("1900", "9" * 200_000), "row 3: no ttft_p99_ms"),
        ('{"a": 1}', "document 1 is not a supported benchmark report"),
        (json.dumps({"request_throughput": 1.0}), "document 1: no p99_ttft_ms; run `vllm bench"),
        (json.dumps(VLLM | {"p99_itl_ms": float("nan")}), "no p99_itl_ms"),
        (json.dumps({"benchmarks": [{"metrics": {}}]}), "no metrics.requests_per_second"),
        (json.dumps({"request_throughput": {"unit": "requests/sec", "avg": 1}}), "--streaming"),
    ],
)
def test_an_error_says_where_and_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(SizingError) as raised:
        read_benchmark(text)
    assert message in str(raised.value)
    assert raised.value.name == "benchmark"


def test_vllm_bench_serve() -> None:
    (point,) = read_benchmark(json.dumps(VLLM)).points
    assert (point.concurrency, point.requests_per_s) == (48, 12)
    assert (point.ttft_p99_s, point.ttft_p50_s) == (1.9, 0.9)
    assert (point.itl_p99_s, point.itl_p50_s) == (0.03, 0.014)
    assert (point.requests, point.failed, point.output_tokens_per_s) == (1000, 0, 2400)
    # 1.02 s to the first token and 199 more at 15 ms: what Little's law gives for 48 at 12/s is 4 s
    assert point.latency_mean_s == pytest.approx(1.02 + 199 * 0.015)


def test_a_measured_life_is_preferred_to_a_derived_one() -> None:
    (point,) = read_benchmark(json.dumps(VLLM | {"mean_e2el_ms": 3900.0})).points
    assert point.latency_mean_s == 3.9


@pytest.mark.parametrize("join", ["", "\n", ",\n", "\n\n"], ids=["", "lines", "commas", "blank"])
def test_several_results_in_a_row(join: str) -> None:
    """`--append-result` writes one object per line; files are also simply concatenated."""
    results = [json.dumps(VLLM | {"max_concurrency": c}) for c in (96, 8, 48)]
    assert [p.concurrency for p in read_benchmark(join.join(results)).points] == [8, 48, 96]
    assert [p.concurrency for p in read_benchmark(f"[{','.join(results)}]").points] == [8, 48, 96]
    one_each = merged([read_benchmark(text) for text in results])
    assert [p.concurrency for p in one_each.points] == [8, 48, 96]


def test_an_open_loop_run_gets_its_concurrency_from_littles_law() -> None:
    benchmark = read_benchmark(json.dumps(VLLM | {"max_concurrency": None}))
    assert benchmark.points[0].concurrency == pytest.approx(12 * (1.02 + 199 * 0.015))
    assert any("Little's law" in note for note in benchmark.notes)
    bare = VLLM | {"max_concurrency": None, "mean_tpot_ms": None}
    with pytest.raises(SizingError, match="neither a concurrency nor a mean latency"):
        read_benchmark(json.dumps(bare))


def test_more_concurrency_than_requests_is_noted() -> None:
    benchmark = read_benchmark(json.dumps(VLLM | {"max_concurrency": 2000}))
    assert any("2000 stated, but only 1000 requests were sent" in note for note in benchmark.notes)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"request_rate": "inf"}, "no bursts", id="a closed loop"),
        pytest.param({"request_rate": 5.0, "burstiness": 4.0}, "burstiness 4", id="even arrivals"),
        pytest.param({"input_lens": [1024] * 9}, "every input has the same length", id="uniform"),
    ],
)
def test_what_production_has_and_the_run_had_not(changed: dict[str, object], expected: str) -> None:
    real = {"request_rate": 5.0, "burstiness": 1.0, "input_lens": [10, 4000]}
    assert read_benchmark(json.dumps(VLLM | real)).notes == ()
    benchmark = read_benchmark(json.dumps(VLLM | real | changed))
    assert any(expected in note for note in benchmark.notes)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        pytest.param({"type_": "concurrent", "streams": 8}, 8, id="0.3 and 0.5: streams"),
        pytest.param({"type_": "concurrent", "max_concurrency": 8}, 8, id="0.4: max_concurrency"),
        pytest.param({"type_": "synchronous"}, 1, id="synchronous: one at a time"),
        pytest.param({"type_": "throughput", "max_concurrency": 512}, 7.5, id="a limit, not met"),
        pytest.param({"type_": "constant", "rate": 3.0}, 7.5, id="open loop: as measured"),
    ],
)
def test_guidellm(strategy: object, expected: float) -> None:
    benchmark = read_benchmark(json.dumps({"benchmarks": [guidellm_run(strategy)]}))
    (point,) = benchmark.points
    assert (point.concurrency, point.requests_per_s, point.ttft_p99_s) == (expected, 3, 0.3)
    assert (point.itl_p99_s, point.itl_p50_s, point.latency_mean_s) == (0.02, 0.011, 2.5)
    assert (point.requests, point.failed, point.output_tokens_per_s) == (900, 3, 600)
    assert "reports ITL as a mean per request" in benchmark.notes[0]


def test_guidellm_keeps_a_sweep_in_one_file() -> None:
    runs = [guidellm_run({"type_": "concurrent", "streams": n}) for n in (16, 4)]
    benchmark = read_benchmark(json.dumps({"benchmarks": runs}))
    assert [p.concurrency for p in benchmark.points] == [4, 16]
    assert benchmark.points[0].origin == "document 1, benchmark 2"
    assert len(benchmark.notes) == 1


def test_aiperf_json_takes_itl_gap_by_gap() -> None:
    """Of one run, P99 by gaps is 118 ms and by request averages 13 ms: a target means gaps."""
    benchmark = read_benchmark(json.dumps(AIPERF))
    (point,) = benchmark.points
    assert (point.concurrency, point.requests) == (16, 96)
    assert point.itl_p99_s == pytest.approx(0.117986, rel=1e-4)
    assert point.ttft_p99_s == pytest.approx(0.68762)
    assert point.latency_mean_s == pytest.approx(6.72666)
    assert "inter_chunk_latency" in benchmark.notes[0]


def test_aiperf_json_without_gaps_falls_back_and_says_so() -> None:
    document: dict[str, object] = dict(AIPERF)
    del document["inter_chunk_latency"]
    document["input_config"] = {"loadgen": {"concurrency": 4}}
    benchmark = read_benchmark(json.dumps(document))
    assert benchmark.points[0].concurrency == 4
    assert benchmark.points[0].itl_p99_s == pytest.approx(0.01327247)
    assert "stalls" in benchmark.notes[0]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4096), st.floats(0.01, 1e4), st.floats(0.5, 1e5), st.floats(0.1, 1e4)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_table_and_vllm_json_of_the_same_figures_agree(
    rows: list[tuple[int, float, float, float]],
) -> None:
    table = "concurrency,rps,ttft_p99_ms,itl_p99_ms\n" + "".join(
        f"{c},{rps!r},{ttft!r},{itl!r}\n" for c, rps, ttft, itl in rows
    )
    reports = "\n".join(
        json.dumps(
            {"max_concurrency": c, "request_throughput": r, "p99_ttft_ms": t, "p99_itl_ms": i}
        )
        for c, r, t, i in rows
    )
    for ours, theirs in zip(
        read_benchmark(table).points, read_benchmark(reports).points, strict=True
    ):
        assert (ours.concurrency, ours.requests_per_s) == (
            theirs.concurrency,
            theirs.requests_per_s,
        )
        assert ours.ttft_p99_s == pytest.approx(theirs.ttft_p99_s)
        assert ours.itl_p99_s == pytest.approx(theirs.itl_p99_s)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(SizingError):
        assert read_benchmark(text).points


QWEN = model("Qwen/Qwen3-32B")


@pytest.mark.parametrize(
    ("named", "note"),
    [
        pytest.param("Qwen/Qwen3-32B", "", id="the same"),
        pytest.param("/models/qwen3-32b/", "", id="by a path"),
        pytest.param("Qwen/Qwen3-32B-FP8", "", id="in another precision"),
        pytest.param("chat", "check that it is Qwen/Qwen3-32B", id="a served name"),
        pytest.param("", "", id="none"),
    ],
)
def test_a_benchmark_names_its_model(named: str, note: str) -> None:
    benchmark = read_benchmark(json.dumps({**VLLM, "model_id": named}))
    before = len(benchmark.notes)
    notes = matched(benchmark, QWEN).notes[before:]
    assert [note in text for text in notes] == [True] * bool(note)


def test_a_benchmark_of_another_model_is_refused() -> None:
    benchmark = read_benchmark(json.dumps({**VLLM, "model_id": "Qwen/Qwen3-8B"}))
    with pytest.raises(SizingError, match="is of Qwen/Qwen3-8B, not of Qwen/Qwen3-32B") as refused:
        matched(benchmark, QWEN)
    assert refused.value.name == "benchmark"


@pytest.mark.parametrize("tool", ["vllm", "guidellm", "aiperf"])
def test_a_benchmark_of_other_lengths_says_so(tool: str) -> None:
    run = guidellm_run({"type_": "concurrent", "streams": 8})
    metrics: dict[str, object] = dict(run["metrics"])  # type: ignore[call-overload]
    run["metrics"] = metrics | {"prompt_token_count": {"successful": {"mean": 1000.0}}}
    texts = {
        "vllm": json.dumps(VLLM),
        "guidellm": json.dumps({"benchmarks": [run]}),
        "aiperf": json.dumps({**AIPERF, "input_sequence_length": {"avg": 1000.0}}),
    }
    benchmark = read_benchmark(texts[tool])
    assert benchmark.points[0].input_tokens == 1000
    tokens = (benchmark.points[0].output_tokens_per_s or 0) / benchmark.points[0].requests_per_s
    fits = matched(benchmark, QWEN, input_tokens=1200, output_tokens=1.2 * tokens)
    far = matched(benchmark, QWEN, input_tokens=4000, output_tokens=3000)
    assert not any("to size for" in note for note in fits.notes)
    assert sum("to size for" in note for note in far.notes) == 2


def test_achieved_shares_are_those_of_the_bytes_and_products() -> None:
    """Text 001, 4.3 and 4.8: tokens/s x bytes per token / bandwidth, tokens/s x FLOP / peak."""
    card, rate = gpu("h200"), 2.0
    read = costs(Launch(QWEN, card))
    load = Load(input_tokens=1000, output_tokens=200, concurrency=1)
    point = BenchmarkPoint(1, rate, 1.0, 0.02, output_tokens_per_s=rate * 200, input_tokens=1000)
    loop = performance(read, load, DEFAULT).loop
    reached = achieved(point, loop)
    kept_bytes = read.weights_bytes + read.kv_bytes_per_token * 1100
    assert reached["mbu_ratio"] == pytest.approx(
        rate * 200 * kept_bytes / card.memory_bandwidth_bytes_per_s
    )
    flop = 1200 * read.body_flop_per_token + 200 * read.head_flop_per_token
    assert reached["mfu_ratio"] == pytest.approx(rate * flop / card.bf16_flop_per_s)
    twice = achieved(replace(point, requests_per_s=2 * rate), loop)
    assert twice["predicted_mbu_ratio"] != twice["mbu_ratio"]
    shared = achieved(replace(point, concurrency=64.0), loop)
    assert shared["mbu_ratio"] < reached["mbu_ratio"], "64 requests share a read of the weights"
    assert shared["predicted_mfu_ratio"] > reached["predicted_mfu_ratio"]
