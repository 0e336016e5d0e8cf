"""vLLM's metrics found on real pages, and under the prefixes and suffixes of deployments."""

from __future__ import annotations

import re

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import parse
from kneewatch.collector.names.vllm_metrics import PREFIXES, EngineKey, HistogramSlots
from kneewatch.collector.names.vllm_resolver import resolve
from tests.collector.name_pages import (
    CORE,
    PAGES,
    kinds,
    only_engine,
    prefixed,
    recorded,
    resolved,
    slots,
    values,
)

ALL_PAGES = sorted(path.name[5:-7] for path in PAGES.glob("vllm-*.txt.gz"))
UNLISTED = ("acme_llm_", "")


# Recorded pages


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_recorded_page_has_all_core_metrics_of_one_engine(name: str) -> None:
    page, binding = resolved(recorded(name))
    engine = only_engine(binding)
    assert (binding.prefix, engine.key) == ("vllm:", EngineKey("tiny", "0"))
    assert engine.shared == frozenset()
    assert {name: kinds(engine).get(name) for name in CORE} == CORE
    assert binding.process_start is not None
    assert page.layout.series[binding.process_start].name == "process_start_time_seconds"


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_vllm_series_of_a_recorded_page_is_used_once(name: str) -> None:
    page, binding = resolved(recorded(name))
    engine = only_engine(binding)
    used = list(engine.created)
    for metric in kinds(engine):
        for slot in slots(engine, metric):
            if isinstance(slot, HistogramSlots):
                used += [*slot.buckets, *(at for at in (slot.sum, slot.count) if at is not None)]
            else:
                used.append(slot.position)
    # Two pages have a metric under two names: the former one is not used.
    former = {"0.10.0": "vllm:gpu_", "0.11.2": "vllm:time_per_output"}.get(name.split("-")[0], "-")
    names = [series.name for series in page.layout.series]
    ours = [
        position
        for position, name in enumerate(names)
        if name in ("http_requests_total", "process_resident_memory_bytes", "process_open_fds")
        or (name.startswith("vllm:") and (name.endswith("_created") or not name.startswith(former)))
    ]
    assert sorted(used) == ours


@pytest.mark.parametrize(
    ("page_name", "metric", "stands_as"),
    [
        ("0.8.5-rendered", "kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("0.8.5-rendered", "prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total"),
        ("0.8.5-rendered", "num_preemptions", "vllm:num_preemptions_total"),
        ("0.10.0-rendered", "kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("0.10.0-rendered", "prefix_cache_queries", "vllm:prefix_cache_queries_total"),
        ("0.32.0-spec", "spec_decode_num_drafts", "vllm:spec_decode_num_drafts_total"),
    ],
)
def test_a_renamed_metric_is_found_and_the_new_name_wins(
    page_name: str, metric: str, stands_as: str
) -> None:
    page, binding = resolved(recorded(page_name))
    (slot,) = slots(only_engine(binding), metric)
    assert not isinstance(slot, HistogramSlots)
    assert page.layout.series[slot.position].name == stands_as


@pytest.mark.parametrize(
    ("page_name", "stem"),
    [
        ("0.10.0-rendered", "vllm:time_per_output_token_seconds"),
        ("0.11.2-rendered", "vllm:inter_token_latency_seconds"),
        ("0.14.0-rendered", "vllm:inter_token_latency_seconds"),
    ],
)
def test_a_renamed_histogram_keeps_its_parts_together(page_name: str, stem: str) -> None:
    page, binding = resolved(recorded(page_name))
    (histogram,) = only_engine(binding).histograms["inter_token_latency_seconds"]
    parts = [*histogram.buckets, histogram.sum, histogram.count]
    names = {page.layout.series[at].name for at in parts if at is not None}
    assert names == {f"{stem}_bucket", f"{stem}_sum", f"{stem}_count"}


def test_values_and_labels_stand_where_they_are_said_to() -> None:
    page, binding = resolved(recorded("0.28.0-loaded"))
    engine = only_engine(binding)
    assert values(page, engine, "num_preemptions") == {"": 4.0}
    assert values(page, engine, "generation_tokens") == {"": 7680.0}
    assert values(page, engine, "iteration_tokens_total") == {"": 641.0}
    reasons = values(page, engine, "request_success")
    assert reasons == {"stop": 0, "length": 24, "abort": 0, "error": 0, "repetition": 0}
    assert {page.layout.series[at].name for at in engine.created} >= {
        "vllm:num_preemptions_created",
        "vllm:iteration_tokens_total_created",
    }


def test_a_histogram_has_ascending_bounds_with_their_buckets() -> None:
    page, binding = resolved(recorded("0.28.0-loaded"))
    (ttft,) = only_engine(binding).histograms["time_to_first_token_seconds"]
    assert (ttft.bounds[0], ttft.bounds[-1]) == (0.001, float("inf"))
    assert list(ttft.bounds) == sorted(set(ttft.bounds))
    les = [page.layout.series[at].label("le") for at in ttft.buckets]
    assert [float(le) for le in les] == list(ttft.bounds)
    assert ttft.sum is not None
    assert page.values[ttft.sum] == 601.0714027881622
    assert page.values[ttft.buckets[-1]] == 24


def test_cache_config_and_the_newest_of_the_lora_infos_are_read() -> None:
    page, binding = resolved(recorded("0.32.0-lora"))
    engine = only_engine(binding)
    assert int(engine.info("cache_config_info", page.values)["num_gpu_blocks"]) > 0
    many = engine.infos["lora_requests_info"]
    assert len(many) > 3
    newest = max(many, key=lambda slot: page.values[slot.position])
    assert engine.info("lora_requests_info", page.values) == dict(newest.labels)
    names = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert dict(newest.labels).keys() == names
    for slot in many[:-1]:
        page.values[slot.position] = float("nan")
    assert engine.info("lora_requests_info", page.values) == dict(many[-1].labels)
    assert engine.info("no_such_info", page.values) == {}


def test_the_http_servers_calls_belong_to_the_only_engine() -> None:
    page, binding = resolved(recorded("0.28.0-loaded"))
    (calls,) = only_engine(binding).counters["http_requests"]
    assert dict(calls.labels)["handler"] == "/v1/completions"
    assert page.values[calls.position] == 24


def test_several_processes_on_a_page_leave_the_start_unknown() -> None:
    start = "process_start_time_seconds"
    body = f'{recorded("0.28.0-loaded")}\n{start}{{pod="b"}} 1\n'
    assert resolve(parse(body).layout).process_start is None


# The V0 engine labels with model_name only; its histograms appear with the first observation.
V0_PAGE = """
vllm:num_requests_running{model_name="m"} 3
vllm:num_requests_waiting{model_name="m"} 1
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:num_preemptions_total{model_name="m"} 2
vllm:prompt_tokens_total{model_name="m"} 100
vllm:generation_tokens_total{model_name="m"} 200
vllm:request_success_total{finished_reason="stop",model_name="m"} 4
vllm:request_params_n_sum{model_name="m"} 4
vllm:request_params_n_count{model_name="m"} 4
vllm:cache_config_info{block_size="16",num_gpu_blocks="2000"} 1
"""


def test_a_v0_page_is_one_engine_named_0() -> None:
    page, binding = resolved(V0_PAGE)
    engine = only_engine(binding)
    assert engine.key == EngineKey("m", "0")
    assert values(page, engine, "kv_cache_usage_perc") == {"": 0.5}
    assert engine.info("cache_config_info", page.values)["num_gpu_blocks"] == "2000"


# Prefixes and suffixes


@pytest.mark.parametrize("prefix", [*PREFIXES, *UNLISTED])
@pytest.mark.parametrize("name", ["0.8.5-rendered", "0.32.0-loaded"])
def test_the_prefix_is_told_by_the_page(name: str, prefix: str) -> None:
    page, binding = resolved(recorded(name))
    other_page, other = resolved(prefixed(recorded(name), prefix))
    assert other.prefix == prefix
    engine, same = only_engine(binding), only_engine(other)
    assert kinds(engine) == kinds(same)
    for metric in kinds(engine):
        assert values(page, engine, metric) == values(other_page, same, metric)


@pytest.mark.parametrize("prefix", ["ray_vllm_", "vllm_"])
def test_counters_may_come_without_total(prefix: str) -> None:
    body = re.sub(r"(?m)^(vllm:\w+)_total\{", r"\1{", recorded("0.32.0-loaded"))
    page, binding = resolved(prefixed(body, prefix))
    assert values(page, only_engine(binding), "generation_tokens")[""] > 0


def test_of_a_counter_with_and_without_total_only_one_counts() -> None:
    # Ray's agent shows each counter both ways; the one without is typed a gauge.
    body = recorded("0.32.0-loaded")
    both = re.sub(r"(?m)^(vllm:\w+)_total(\{.*\}) .*$", r"\1\2 7777\n\g<0>", body)
    page, binding = resolved(prefixed(both, "ray_vllm_"))
    plain_page, plain = resolved(body)
    for metric in only_engine(plain).counters:
        metric_values = values(page, only_engine(binding), metric)
        assert metric_values == values(plain_page, only_engine(plain), metric)


def test_a_known_prefix_is_preferred_where_a_page_has_two() -> None:
    body = recorded("0.32.0-loaded")
    _, binding = resolved(prefixed(body, "copy_of_") + body)
    assert binding.prefix == "vllm:"
    assert len(binding.engines) == 1


# Pages without vLLM


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("", "--disable-log-stats"),
        ("process_cpu_seconds_total 1\n", "--disable-log-stats"),
        ("# TYPE vllm:num_requests_running gauge\n", "send vLLM a request"),
        ('vllm:current_qps{server="http://a"} 1\nvllm:healthy_pods_total 2\n', "behind it"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0"} 30\n', "GPU source"),
        ("kneewatch_stage 0\n", "its verdict: curl"),
        # Another server that shares one telling name with vLLM
        ("maxserve_num_requests_running 1\nmaxserve_time_to_first_token_seconds_sum 1\n", "own"),
    ],
)
def test_a_page_without_vllm_is_an_error_and_says_what_to_try(body: str, hint: str) -> None:
    with pytest.raises(CollectError) as caught:
        resolve(parse(body).layout)
    assert caught.value.kind == "no_vllm"
    assert hint in caught.value.hint


SHARED_WITH_VLLM = """\
{0}num_requests_running 3
{0}num_requests_waiting 1
{0}gpu_cache_usage_perc 0.4
{0}prompt_tokens_total 500
{0}generation_tokens_total 90
{0}time_to_first_token_seconds_sum 1
{0}time_to_first_token_seconds_count 4
{0}e2e_request_latency_seconds_sum 9
{0}e2e_request_latency_seconds_count 4
"""
"""Names that engines took over from vLLM."""


@pytest.mark.parametrize(
    ("body", "program"),
    [
        (SHARED_WITH_VLLM.format("lmdeploy:"), "LMDeploy"),
        (SHARED_WITH_VLLM.format("sglang:"), "SGLang"),
        (
            'nv_inference_request_success{model="m"} 9\n'
            'nv_trt_llm_request_metrics{request_type="active"} 1\n',
            "Triton with TensorRT-LLM",
        ),
        ("dynamo_frontend_queued_requests 0\n", "Dynamo"),
        ('vllm_router_cb_state{worker="http://a:1"} 0\n', "vllm-router"),
        ('smg_worker_health{worker="http://a:1"} 1\n', "sglang-router"),
        # It has names of vLLM's, of each server behind it.
        (
            'vllm:num_requests_running{server="http://a"} 3\n'
            'vllm:healthy_pods_total{server="http://a"} 1\n',
            "production-stack router",
        ),
        ('llm_d_epp_ready_endpoints{name="p"} 2\n', "llm-d"),
    ],
)
def test_another_engine_is_named_and_not_judged(body: str, program: str) -> None:
    with pytest.raises(CollectError) as caught:
        resolve(parse(body).layout)
    assert program in str(caught.value)
    assert caught.value.hint


def test_names_that_others_share_make_no_page_vllms() -> None:
    with pytest.raises(CollectError, match="no vLLM metrics"):
        resolve(parse(SHARED_WITH_VLLM.format("maxserve_")).layout)


def test_a_page_with_vllm_series_but_no_core_metric_is_told_by_what_it_has() -> None:
    body = 'vllm:lora_requests_info{max_lora="2"} 1\nvllm:mm_cache_hits_total 3\n'
    with pytest.raises(CollectError) as caught:
        resolve(parse(body).layout)
    assert "only 2 vLLM metrics" in str(caught.value)
    assert "vllm:mm_cache_hits_total" in str(caught.value)
    assert "relabelling" in caught.value.hint
