"""Pages of other engines than vLLM, read as the same canonical metrics."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.size_command import sized, with_launch
from kneewatch.agent.stream import target_monitor
from kneewatch.collector.engines.engine_kind import engine_kinds
from kneewatch.collector.engines.translation import canonical_metric
from kneewatch.collector.exposition import parse
from kneewatch.collector.names.vllm_resolver import resolve
from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.vllm_flags import FLAGS
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.wording import FLAG, OWN_FLAGS, spelled, spoken
from kneewatch.diagnose.ranking import CAUSES
from kneewatch.diagnose.sizing.size import Size
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import decode, encode
from kneewatch.reports.advice_text import stop_gap
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import WARNING
from tests.diagnose.situations import CALM, CONCLUSIVE
from tests.reports.diagnoses import HEALTHY

FIXTURES = Path(__file__).parents[1] / "fixtures"
SGLANG = "pages/sglang-0.5.23-rendered"


def text_of(name: str) -> str:
    """A stored page."""
    return gzip.decompress((FIXTURES / f"{name}.txt.gz").read_bytes()).decode()


def read(body: str) -> tuple[str, Mapping[str, float]]:
    """The engine's kind, and its gauges and counters by metric and own labels."""
    page = parse(body)
    binding = resolve(page.layout)
    values = binding.completed(page).values
    (engine,) = binding.engines
    slots = {**engine.gauges, **engine.counters}
    return engine.kind.title, {
        "|".join([metric, *(f"{k}={v}" for k, v in slot.labels)]): values[slot.position]
        for metric, own in slots.items()
        for slot in own
    }


def verdicts(*bodies: str) -> Verdict:
    """The newest verdict after pages ten seconds apart."""
    monitor = target_monitor("s", Profile())
    newest = [monitor.page(1000.0 + 10 * at, parse(body)) for at, body in enumerate(bodies)]
    (verdict,) = newest[-1]
    return verdict


def sglang(**values: float) -> str:
    """SGLang's page with other values of gauges and counters."""
    lines = text_of(SGLANG).splitlines()
    return "\n".join(
        f"{line.rsplit(' ', 1)[0]} {values[name]}"
        if (name := line.partition("{")[0].removeprefix("sglang:")) in values
        else line
        for line in [*lines, ""]
    )


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("engines/llamacpp-metrics-loaded", "llama.cpp",
         {"num_requests_running": 2, "num_requests_waiting": 1, "prompt_tokens": 259,
          "prefix_cache_hits": 103, "engine_steps": 345}),
        # No token counters: the first tokens and what follows them are counted.
        ("engines/dynamo-worker-metrics-loaded", "vLLM (Dynamo)",
         {"num_requests_running": 16, "generation_tokens": 269 + 31395}),
        ("engines/dynamo-worker-sglang-metrics", "SGLang (Dynamo)",
         {"num_requests_running": 0, "request_success": 60, "generation_tokens": 60 + 7140}),
        (SGLANG, "SGLang",
         {"num_preemptions": 1, "prefix_cache_queries": 20, "prefix_cache_hits": 10,
          "prompt_tokens": 20, "generation_tokens": 10, "kv_pool_tokens": 100_000}),
    ],
)  # fmt: skip
def test_each_engines_page_is_read_as_canonical_metrics(
    name: str, kind: str, expected: dict[str, float]
) -> None:
    title, values = read(text_of(name))
    assert title == kind
    assert {key: values.get(key) for key in expected} == expected


def test_kv_usage_of_sglang_is_exact_and_that_of_the_fullest_pool() -> None:
    _, values = read(sglang(kv_used_tokens=41_234, token_usage=0.41))
    assert values["kv_cache_usage_perc"] == pytest.approx(0.41234)
    _, values = read(sglang(kv_used_tokens=41_234, mamba_usage=0.93))
    assert values["kv_cache_usage_perc"] == 0.93


def test_ranks_of_tensor_parallelism_are_not_added_and_dp_ranks_are_engines() -> None:
    def rank(tp: int, dp: int, running: int) -> str:
        labels = f'dp_rank="{dp}",model_name="m",moe_ep_rank="{tp}",pp_rank="0",tp_rank="{tp}"'
        return f"sglang:num_running_reqs{{{labels}}} {running}\n"

    page = parse(rank(0, 0, 3) + rank(1, 0, 3) + rank(2, 1, 5) + rank(3, 1, 5))
    binding = resolve(page.layout)
    values = binding.completed(page).values
    running = {
        engine.key.engine: values[engine.gauges["num_requests_running"][0].position]
        for engine in binding.engines
    }
    assert running == {"0": 3, "1": 5}


def test_priorities_of_sglang_are_not_added_to_their_total() -> None:
    page = "".join(
        f'sglang:num_queue_reqs{{model_name="m",priority="{priority}"}} {count}\n'
        for priority, count in (("", 5), ("0", 3), ("1", 2))
    )
    assert read(page)[1]["num_requests_waiting"] == 5


def test_a_dynamo_worker_without_token_counters_is_no_fault() -> None:
    body = text_of("engines/dynamo-worker-metrics-loaded")
    verdict = verdicts(body, body.replace("} 31395", "} 31995"), body.replace("} 31395", "} 32595"))
    assert "metrics_missing" not in [cause.id for cause in verdict.causes]
    assert verdict.values["generation_tokens_per_s"] == pytest.approx(60.0)


def test_a_fresh_sglang_server_is_quiet_and_its_counters_are_zero() -> None:
    idle = "\n".join(
        line
        for line in text_of(SGLANG).splitlines()
        if not line.startswith(("sglang:realtime", "sglang:prefill_eff", "sglang:num_retracted_r"))
        and not line.startswith(("sglang:time_to", "sglang:inter_", "sglang:e2e", "sglang:num_req"))
    )
    verdict = verdicts(*[f"{idle}\n"] * 4)
    assert [cause.id for cause in verdict.causes if cause.severity >= WARNING] == []
    assert verdict.values["preemption_per_s"] == 0.0
    assert verdict.program == "SGLang"
    assert decode(encode(verdict)).program == "SGLang"


def test_a_verdict_on_sglang_has_its_words_and_flags() -> None:
    full = {"num_running_reqs": 40, "num_queue_reqs": 30, "kv_used_tokens": 99_000}
    pages = [sglang(**full, num_retracted_requests_total=1 + 40 * at) for at in range(4)]
    first = verdicts(*pages).causes[0]
    texts = " ".join([first.summary, first.lever, *(each.text for each in first.evidence)])
    assert first.id == "kv_pressure"
    assert "--mem-fraction-static" in texts
    assert "--gpu-memory-utilization" not in texts
    assert "vLLM" not in texts
    assert "preempt" not in texts


def test_speculation_of_sglang_is_read_from_its_gauges() -> None:
    values = {"spec_accept_length": 1.6, "spec_accept_rate": 0.2}
    decode = 'sglang:realtime_tokens_total{engine_type="unified",mode="decode"'
    pages = [
        "\n".join(
            line.rsplit(" ", 1)[0] + f" {10 + 320 * at}" if line.startswith(decode) else line
            for line in sglang(**values).splitlines()
        )
        for at in range(3)
    ]
    read_values = verdicts(*[f"{page}\n" for page in pages]).values
    assert read_values["spec_acceptance_ratio"] == pytest.approx(0.2)
    assert read_values["spec_accepted_per_draft_tokens"] == pytest.approx(0.6)
    # 32 tokens/s at 1.6 a draft are 20 drafts/s; each had 3 tokens.
    assert read_values["spec_draft_tokens_per_s"] == pytest.approx(60.0)
    assert verdicts(*[sglang()] * 3).values["spec_acceptance_ratio"] is None


def test_llama_cpp_is_not_stalled_while_it_takes_steps() -> None:
    body = text_of("engines/llamacpp-metrics-loaded")
    steps = [
        body.replace("n_decode_total 345", f"n_decode_total {345 + 9 * at}") for at in range(6)
    ]
    assert verdicts(*steps).values["stalled_s"] == 0.0
    assert verdicts(*[body] * 6).causes[0].id == "engine_stalled"


def test_the_default_port_is_the_engines_own() -> None:
    hint = "listens on this address; vLLM's default port is 8000"
    said = {kind.title: kind.said(hint).rpartition(" ")[2] for kind in engine_kinds()}
    assert (said["SGLang"], said["llama.cpp"]) == ("30000", "8080")


def test_every_source_is_a_canonical_metric_and_every_flag_is_spelled() -> None:
    for kind in engine_kinds():
        assert all(canonical_metric(metric, kind).name == metric for metric in kind.shows)
        assert all(canonical_metric(own, kind).names[0] == own for own in kind.quantities)
        assert all(flag.startswith("--") for pair in kind.flags.items() for flag in pair)


def sglang_size(command: str) -> tuple[Size, str]:
    """The size of a command line of SGLang's, and the answer's text."""
    answer = sized(with_launch({flag.parameter: flag.default for flag in FLAGS} | {
        "launch": f"python -m sglang.launch_server --model-path {command}", "gpu": "h100-sxm"
    }))  # fmt: skip
    assert answer.size is not None
    return answer.size, "\n".join(answer.text(200, whole=True))


def test_a_launch_of_sglangs_is_sized_by_its_rule_and_answered_in_its_flags() -> None:
    model = "meta-llama/Llama-3.3-70B-Instruct"
    size, text = sglang_size(f"{model} --tp 4 --mem-fraction-static=0.85 --max-running-requests 96")
    launch, memory = size.memory.launch, size.memory
    assert (launch.utilization, launch.seqs, launch.parallel.tensor) == (0.85, 96, 4)
    # By hand: 0.85 x (79.18 - 0.8) GiB free before loading, less 32.86 GiB of weights and 0.03 of
    # tables of rotary positions.
    assert memory.available_bytes.expected / 2**30 == pytest.approx(33.74, abs=0.02)
    assert "--mem-fraction-static 0.85" in text
    assert "--max-running-requests 96" in text
    assert not [word for word in ("vLLM", "--gpu-memory", "vllm serve") if word in text]


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        # (81,080 - max(512 + 1.5 x 8,192 + 128 + 2 x 256, 10,240)) / 81,080
        ("", 0.834),
        ("--chunked-prefill-size 4096", 0.874),
        ("--chunked-prefill-size 32768", 0.38),
    ],
)
def test_the_default_share_of_sglang_leaves_its_slack(flags: str, share: float) -> None:
    size, _ = sglang_size(f"meta-llama/Llama-3.1-8B-Instruct {flags}")
    assert size.memory.launch.utilization == pytest.approx(share, abs=0.002)


def test_what_sglangs_rule_does_not_cover_is_refused() -> None:
    with pytest.raises(SizingError, match="not sized for SGLang"):
        sized({flag.parameter: flag.default for flag in FLAGS} | {
            "model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "h100-sxm", "engine": "sglang",
            "max_loras": 4,
        })  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ("trtllm-serve m --tp_size 2", "--kv_cache_free_gpu_memory_fraction"),
        ("llama-server -m m.gguf", "--ctx-size"),
        ("sudo reboot now", "no vLLM command line"),
    ],
)
def test_size_refuses_the_launch_of_another_engine_and_says_how_large_its_cache_is(
    launch: str, says: str
) -> None:
    with pytest.raises(SizingError, match=says):
        with_launch({"launch": launch})


TRT = """trtllm_num_requests_running{labels} {running}
trtllm_num_requests_waiting{labels} {waiting}
trtllm_num_paused_requests{labels} {paused}
trtllm_kv_cache_utilization{labels} {kv}
trtllm_kv_cache_max_blocks{labels} 1000
trtllm_kv_cache_tokens_per_block{labels} 32
trtllm_kv_cache_gen_alloc_blocks_total{labels} {blocks}
trtllm_request_success_total{{finished_reason="stop",model_name="m"}} {answers}
trtllm_request_error_total{{http_code="500",model_name="m"}} {errors}
"""


def trtllm(**values: float) -> str:
    """A page of trtllm-serve; the values that are not given are 0."""
    names = ("running", "waiting", "paused", "kv", "blocks", "answers", "errors")
    return TRT.format(labels='{model_name="m"}', **(dict.fromkeys(names, 0.0) | values))


def test_tensorrt_llm_is_stalled_once_its_answers_take_no_block() -> None:
    busy = [trtllm(running=8, kv=0.4, blocks=100 + 40 * at, answers=9) for at in range(6)]
    assert verdicts(*busy).values["stalled_s"] == 0.0
    assert verdicts(*busy).values["kv_capacity_tokens"] == 32_000
    (first, *_) = verdicts(*[busy[0]] * 6).causes
    assert first.id == "engine_stalled"
    without = [page.replace("trtllm_kv_cache_gen_alloc", "trtllm_other") for page in busy]
    assert not verdicts(*without).causes


def test_paused_requests_of_tensorrt_llm_wait_for_blocks() -> None:
    pages = [
        trtllm(running=40, paused=12, kv=0.99, blocks=100 + 40 * at, answers=at) for at in range(8)
    ]
    verdict = verdicts(*pages)
    assert verdict.values["waiting_by_capacity"] == 12
    (cause,) = verdict.causes
    assert (cause.id, cause.summary) == (
        "kv_pressure",
        "KV cache full: requests are queueing for blocks.",
    )
    assert [each.text for each in cause.against] == ["preemptions are not reported"]


def test_errors_of_other_engines_are_calls_that_fail() -> None:
    failing = [trtllm(running=2, blocks=9 * at, answers=40 * at, errors=20 * at) for at in range(5)]
    cause = verdicts(*failing).causes[0]
    assert cause.id == "requests_failing"
    assert "33% of the calls fail with HTTP 5xx" in cause.summary

    def answers(at: int) -> str:
        counts = {
            "/v1/completions": (("200", 50), ("503", 30), ("400", 1)),
            "/health": (("503", 99),),
        }
        return "".join(
            f'sglang:http_responses_total{{endpoint="{endpoint}",method="POST",'
            f'status_code="{status}"}} {count * at}\n'
            for endpoint, statuses in counts.items()
            for status, count in statuses
        )

    pages = [sglang(num_requests_total=1 + 50 * at) + answers(at) for at in range(5)]
    cause = verdicts(*pages).causes[0]
    assert cause.id == "requests_failing"
    assert "--max-queued-requests" in cause.lever
    assert verdicts(*pages).values["client_error_per_s"] == pytest.approx(0.1)


def test_what_sglang_measures_itself_is_evidence() -> None:
    full = {"num_running_reqs": 40, "num_queue_reqs": 30, "kv_used_tokens": 99_000}
    pages = [
        sglang(
            **full, num_retracted_requests_total=40 * at, num_retracted_input_tokens_total=9000 * at
        )
        for at in range(4)
    ]
    texts = [each.text for each in verdicts(*pages).causes[0].evidence]
    assert "retracted requests lose the KV cache of 900.0 tokens/s" in texts
    assert "18.6 GiB of GPU memory were free after the start" in texts
    hybrid = [sglang(num_running_reqs=9, num_queue_reqs=9, mamba_usage=0.97)] * 4
    texts = [each.text for each in verdicts(*hybrid).causes[0].evidence]
    assert "the slots for Mamba states are 97% in use" in texts
    eager = 'sglang:cuda_graph_passes_total{mode="decode_none",model_name="tiny"}'
    values = verdicts(
        *[f"{sglang(fwd_occupancy=64)}{eager} {1 + 30 * at}\n" for at in range(3)]
    ).values
    assert values["eager_decode_ratio"] == 1.0
    assert values["gpu_work_ratio"] == pytest.approx(0.64)


def old_sglang(tokens: int) -> str:
    """A page of SGLang 0.4, which counts tokens when a request ends, and gaps between them at
    once."""
    gauges = {"num_running_reqs": 8, "num_queue_reqs": 0, "token_usage": 0.4}
    counters = {"prompt_tokens_total": 2000, "generation_tokens_total": 900}
    histograms = {
        f"{name}_{part}": value
        for name, count in (("time_to_first_token", 9), ("inter_token_latency", tokens))
        for part, value in (("seconds_count", count), ("seconds_sum", 0.02 * count))
    }
    return "".join(
        f'sglang:{name}{{model_name="m"}} {value}\n'
        for name, value in (gauges | counters | histograms).items()
    )


def test_an_older_sglang_is_stalled_once_no_gap_between_tokens_is_counted() -> None:
    serving = verdicts(*[old_sglang(1000 + 300 * at) for at in range(8)])
    assert (serving.health, serving.values["generation_tokens_per_s"]) == ("ok", 30.0)
    assert verdicts(*[old_sglang(1000)] * 8).causes[0].id == "engine_stalled"


def test_what_to_switch_on_keeps_its_sentences() -> None:
    for kind in engine_kinds():
        assert spelled(kind.switch_on, kind) == kind.said(kind.switch_on)


def test_stop_gaps_and_rules_are_told_in_the_flags_of_the_engine() -> None:
    texts = [step for cause in CAUSES for step in stop_gap(cause.id)]
    texts += [text for rule in RULES for text in (rule.summary, rule.advice, rule.fine)]
    for kind in (each for each in engine_kinds() if not each.beside):
        verdict = replace(HEALTHY, program=kind.title)
        own = {*kind.flags.values(), *OWN_FLAGS, *FLAG.findall(kind.switch_on)}
        for text in texts:
            said = spoken(verdict, text)
            assert own.issuperset(re.findall(r"--[a-z][-\w]+|[A-Z]+_[A-Z_]+", said))
            assert "vLLM" not in said
            assert not said.endswith((":", ";"))
    assert [spoken(HEALTHY, text) for text in texts] == texts


def test_sglang_shows_the_signals_of_nearly_all_causes() -> None:
    shows = next(kind.shows for kind in engine_kinds() if kind.title == "SGLang")
    signals = {signal.key: signal for signal in VLLM_SIGNALS}
    # Prefill's share falls back to that of the end-to-end time.
    signals.pop("prefill_service_ratio")
    lacking = {
        cause
        for cause, situation in CONCLUSIVE.items()
        for key, value in situation.values.items()
        if value is not None and CALM.values.get(key) != value
        if key in signals and signals[key].expr.lacking(shows.__contains__)
    }
    assert lacking == {"adapter_thrash", "engine_asleep"}
