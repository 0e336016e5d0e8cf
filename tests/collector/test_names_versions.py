"""Which versions a page fits, and why a metric is not on it."""

from __future__ import annotations

import re

import pytest

from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.names.vllm_series import EngineKey
from tests.collector.name_pages import PAGES, only_engine, prefixed, recorded, resolved, values

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
V0_OLD = """
vllm:num_requests_swapped{model_name="m"} 1
vllm:cpu_cache_usage_perc{model_name="m"} 0
vllm:gpu_prefix_cache_hit_rate{model_name="m"} -1
vllm:cpu_prefix_cache_hit_rate{model_name="m"} -1
"""
V0_AVERAGES = """
vllm:avg_prompt_throughput_toks_per_s{model_name="m"} 5
vllm:avg_generation_throughput_toks_per_s{model_name="m"} 6
"""
V0_TOKENS = 'vllm:tokens_total{model_name="m"} 9\n'


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


@pytest.mark.parametrize("name", sorted(path.name[5:-7] for path in PAGES.glob("vllm-*.txt.gz")))
def test_a_recorded_page_fits_its_own_version(name: str) -> None:
    _, binding = resolved(recorded(name))
    low, high = binding.version_range
    version = number(name.partition("-")[0])
    assert low is not None
    assert number(low) <= version
    assert high is None or version <= number(high)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("0.8.5-rendered", ("0.8.5", "0.8.5")),
        ("0.10.0-rendered", ("0.9.2", "0.10.0")),
        ("0.11.2-rendered", ("0.11.2", "0.12.0")),
        ("0.17.0-rendered", ("0.17.0", "0.19.1")),
        ("0.27.0-loaded", ("0.20.2", "0.29.0")),
        ("0.32.0-loaded", ("0.32.0", None)),
    ],
)
def test_names_that_are_absent_narrow_the_versions(
    name: str, fits: tuple[str | None, str | None]
) -> None:
    assert resolved(recorded(name))[1].version_range == fits


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (V0_PAGE, ("0.8.5", "0.11.0")),
        (V0_PAGE + V0_OLD, ("0.7.3", "0.8.5")),
        (V0_PAGE + V0_OLD + V0_TOKENS, ("0.7.3", "0.7.3")),
        (V0_PAGE + V0_OLD + V0_AVERAGES, (None, "0.6.6.post1")),
    ],
)
def test_a_v0_page_is_one_engine_named_0(body: str, fits: tuple[str | None, str | None]) -> None:
    page, binding = resolved(body)
    engine = only_engine(binding)
    assert engine.key == EngineKey("m", "0")
    assert values(page, engine, "kv_cache_usage_perc") == {"": 0.5}
    assert engine.info("cache_config_info", page.values)["num_gpu_blocks"] == "2000"
    assert binding.version_range == fits
    why = "new in 0.7.3" if fits[1] == "0.6.6.post1" else "only on the V1 engine"
    assert binding.why_missing("prefix_cache_hits") == why


def test_a_page_that_a_scraper_thinned_is_judged_by_what_is_on_it() -> None:
    keep = "num_requests_running|request_num_preemptions|generation_tokens"
    body = re.sub(rf"(?m)^(?!vllm:(?:{keep})).*\n", "", recorded("0.32.0-loaded"))
    _, binding = resolved(body)
    assert binding.version_range == ("0.30.0", None)
    assert binding.why_missing("kv_cache_usage_perc") == "renamed?"
    assert binding.why_missing("num_requests_swapped") == "removed in 0.9.2"


def test_engines_of_several_versions_fit_none() -> None:
    recomputed = 'vllm:prompt_tokens_recomputed_total{engine="0",model_name="tiny"} 1\n'
    _, binding = resolved(recorded("0.32.0-loaded") + recomputed)
    assert binding.version_range == (None, None)


@pytest.mark.parametrize(
    ("name", "metric", "why"),
    [
        ("0.28.0-fresh", "request_num_preemptions", "new in 0.30.0"),
        ("0.28.0-fresh", "admission_rejections", "new in 0.32.0"),
        ("0.28.0-fresh", "prompt_tokens_recomputed", "removed in 0.20.2"),
        ("0.28.0-fresh", "num_requests_swapped", "removed in 0.9.2"),
        ("0.28.0-fresh", "kv_block_lifetime_seconds", "needs --kv-cache-metrics"),
        ("0.28.0-fresh", "spec_decode_num_drafts", "needs --speculative-config"),
        ("0.28.0-fresh", "lora_requests_info", "needs --enable-lora"),
        ("0.28.0-fresh", "corrupted_requests", "needs VLLM_COMPUTE_NANS_IN_LOGITS=1"),
        ("0.28.0-fresh", "num_requests_running", None),
        ("0.32.0-kv-metrics", "kv_block_lifetime_seconds", None),
        ("0.32.0-spec", "spec_decode_num_drafts", None),
        ("0.32.0-lora", "lora_requests_info", None),
        ("0.8.5-rendered", "num_requests_waiting_by_reason", "new in 0.20.2"),
        ("0.8.5-rendered", "num_requests_swapped", "only on the V0 engine"),
        ("0.8.5-rendered", "kv_cache_usage_perc", None),
        # rendered without a server: on a real one it is always there
        ("0.24.0-rendered", "cache_config_info", "renamed?"),
    ],
)
def test_what_is_missing_has_a_reason(name: str, metric: str, why: str | None) -> None:
    _, binding = resolved(recorded(name))
    assert binding.why_missing(metric, only_engine(binding).key) == why


def test_what_v0_hides_needs_a_flag() -> None:
    only_85 = V0_PAGE + 'vllm:time_in_queue_requests_count{model_name="m"} 0\n'
    _, binding = resolved(only_85 + 'vllm:time_in_queue_requests_sum{model_name="m"} 0\n')
    assert binding.version_range == ("0.8.5", "0.8.5")
    assert binding.why_missing("num_requests_swapped") == (
        "needs --show-hidden-metrics-for-version"
    )


def test_a_renamed_core_metric_is_named_first() -> None:
    body = recorded("0.32.0-loaded").replace("vllm:kv_cache_usage_perc", "vllm:kv_blocks_held")
    _, binding = resolved(body)
    first = binding.missing[0]
    assert (first.name, first.why, first.core) == ("kv_cache_usage_perc", "renamed?", True)
    assert binding.unknown_names == ("kv_blocks_held",)


def test_nobody_is_told_of_what_hardly_anybody_has() -> None:
    _, binding = resolved(recorded("0.32.0-loaded"))
    rare = {metric.name for metric in metric_table().metrics.values() if metric.rare}
    assert not rare & {missing.name for missing in binding.missing}


def test_ray_pages_are_judged_by_what_is_on_them() -> None:
    body = re.sub(r"(?m)^vllm:\w+_total\{.*\} 0\.0\n", "", recorded("0.32.0-loaded"))
    _, binding = resolved(prefixed(body, "ray_vllm_"))
    assert binding.version_range == ("0.32.0", None)
