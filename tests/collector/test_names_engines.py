"""Whose a series is: engines, models, replicas, and labels that must change nothing."""

from __future__ import annotations

import re

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import parse
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import resolve
from tests.collector.name_pages import (
    kinds,
    labelled,
    only_engine,
    prefixed,
    recorded,
    resolved,
    unlabelled,
    values,
)
from tests.effort import calls

BUSY = "0.32.0-loaded"
RAY = {
    "Component": "core_worker",
    "NodeAddress": "10.0.0.7",
    "SessionName": "session_2026-11-21_03-00-00_1_2",
    "Version": "2.48.0",
}


def running(body: str, count: int) -> str:
    """vLLM's series of the page with so many requests running."""
    ours = "\n".join(line for line in body.splitlines() if line.startswith("vllm:")) + "\n"
    return re.sub(r"(?m)^(vllm:num_requests_running.*) \S+$", rf"\1 {count}", ours)


def running_by_engine(body: str) -> dict[tuple[str, str, str], float]:
    page, binding = resolved(body)
    count_of_engine = {
        engine.key: values(page, engine, "num_requests_running")[""] for engine in binding.engines
    }
    return {(key.model, key.engine, key.replica): count for key, count in count_of_engine.items()}


def test_engines_of_one_page_are_kept_apart_and_sorted_by_number() -> None:
    body = recorded(BUSY)
    ranks = [10, 2, 0, 1]
    page, binding = resolved("".join(running(labelled(body, engine=str(n)), n) for n in ranks))
    assert [engine.key for engine in binding.engines] == [
        EngineKey("tiny", str(rank)) for rank in sorted(ranks)
    ]
    for engine in binding.engines:
        assert values(page, engine, "num_requests_running") == {"": float(engine.key.engine)}
        assert engine.info("cache_config_info", page.values)["block_size"] == "32"
        (ttft,) = engine.histograms["time_to_first_token_seconds"]
        owners = {page.layout.series[at].label("engine") for at in ttft.buckets}
        assert owners == {engine.key.engine}


def test_models_and_engines_may_come_in_any_combination() -> None:
    pairs = {("a", "0"): 1, ("a", "1"): 2, ("b", "0"): 3, ("b/c, d", "0"): 4}
    body = "".join(
        running(labelled(recorded(BUSY), model_name=model, engine=engine), count)
        for (model, engine), count in pairs.items()
    )
    assert running_by_engine(body) == {(*pair, ""): count for pair, count in pairs.items()}


def test_a_model_without_engine_label_may_stand_beside_one_with() -> None:
    old = running(unlabelled(labelled(recorded("0.8.5-rendered"), model_name="old"), "engine"), 1)
    body = old + running(labelled(recorded(BUSY), engine="0"), 2)
    body += running(labelled(recorded(BUSY), engine="1"), 3)
    assert running_by_engine(body) == {
        ("old", "0", ""): 1,
        ("tiny", "0", ""): 2,
        ("tiny", "1", ""): 3,
    }


@pytest.mark.parametrize("missing", ["engine", "model_name"])
def test_a_page_may_lack_a_label_altogether(missing: str) -> None:
    body = unlabelled(recorded(BUSY), missing)
    page, binding = resolved(body)
    model = "" if missing == "model_name" else "tiny"
    assert only_engine(binding).key == EngineKey(model, "0")
    assert kinds(only_engine(binding)) == kinds(only_engine(resolved(recorded(BUSY))[1]))
    assert page.layout.repeated == frozenset()


def test_a_page_may_have_no_labels_at_all() -> None:
    body = "vllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.42\nvllm:prompt_tokens 7\n"
    page, binding = resolved(body)
    engine = only_engine(binding)
    assert engine.key == EngineKey("", "0")
    assert values(page, engine, "prompt_tokens") == {"": 7}


# Metrics that carry fewer labels than the rest


def test_a_metric_of_a_model_is_given_to_its_engines_and_named_as_shared() -> None:
    body = recorded(BUSY)
    both = "".join(labelled(body, engine=str(n)) for n in range(2))
    other = labelled(body, model_name="other")
    rejected = re.compile(r"(?m)^vllm:admission_rejections.*\n")
    by_model = [
        f'vllm:admission_rejections_total{{model_name="{model}",reason="max_num_queued_reqs"}} {n}'
        for model, n in (("tiny", 5), ("other", 6))
    ]
    page, binding = resolved(rejected.sub("", both + other) + "\n".join(by_model) + "\n")
    value_of_engine = {
        (engine.key.model, engine.key.engine): (
            values(page, engine, "admission_rejections")["max_num_queued_reqs"],
            "admission_rejections" in engine.shared,
        )
        for engine in binding.engines
    }
    assert value_of_engine == {
        ("tiny", "0"): (5, True),
        ("tiny", "1"): (5, True),
        ("other", "0"): (6, False),
    }


def test_what_has_no_label_of_an_engine_is_given_to_all() -> None:
    body = "".join(labelled(recorded("0.8.5-rendered"), engine=str(n)) for n in range(2))
    body = re.sub(r"(?m)^vllm:cache_config_info.*\n", "", body)
    body += 'vllm:cache_config_info{block_size="32",num_gpu_blocks="140"} 1\n'
    page, binding = resolved(body)
    for engine in binding.engines:
        info = engine.info("cache_config_info", page.values)
        assert info == {"block_size": "32", "num_gpu_blocks": "140"}
        assert engine.shared == {"cache_config_info"}


def test_lmcache_is_found_beside_vllm_under_its_own_prefix() -> None:
    body = recorded(BUSY) + (
        'lmcache:num_hit_tokens_total{model_name="/models/tiny",worker_id="0"} 3\n'
        'lmcache:num_hit_tokens_total{model_name="/models/tiny",worker_id="1"} 4\n'
        'lmcache:lmcache_is_healthy{model_name="/models/tiny",worker_id="0"} 1\n'
        "lmcache:something_new 1\n"
    )
    page, binding = resolved(body)
    engine = only_engine(binding)
    assert engine.key == EngineKey("tiny", "0")
    assert values(page, engine, "lmcache_num_hit_tokens") == {"0": 3, "1": 4}
    assert "lmcache_is_healthy" in engine.gauges


def test_lmcache_is_of_none_of_several_engines() -> None:
    body = "".join(labelled(recorded(BUSY), engine=str(n)) for n in range(2))
    _, binding = resolved(body + 'lmcache:num_hit_tokens_total{worker_id="0"} 3\n')
    for engine in binding.engines:
        assert "lmcache_num_hit_tokens" not in engine.counters
    _, alone = resolved(recorded(BUSY) + 'lmcache:num_hit_tokens_total{worker_id="0"} 3\n')
    assert "lmcache_num_hit_tokens" in only_engine(alone).counters


def test_what_one_engine_lacks_the_others_keep() -> None:
    quiet = re.sub(r"(?m)^vllm:num_preemptions.*\n", "", labelled(recorded(BUSY), engine="1"))
    _, binding = resolved(recorded(BUSY) + quiet)
    has = {engine.key.engine: "num_preemptions" in engine.counters for engine in binding.engines}
    assert has == {"0": True, "1": False}


# Labels of the deployment, and replicas


def test_labels_of_the_deployment_change_nothing() -> None:
    body = recorded(BUSY)
    page, binding = resolved(body)
    more = {"instance": "10.0.0.1:8000", "namespace": "llm, prod", "pod": "a", "job": "x",
            "container": "main"}  # fmt: skip
    other_page, other = resolved(labelled(body, **more))
    engine, same = only_engine(binding), only_engine(other)
    assert same.key == engine.key
    for metric in kinds(engine):
        assert values(page, engine, metric) == values(other_page, same, metric)


def test_a_label_of_the_deployment_may_be_called_as_one_of_vllm() -> None:
    body = re.sub(r"(?m)^(vllm:num_requests_running\{)", r'\1source="prod",', recorded(BUSY))
    page, binding = resolved(body)
    sources = values(page, only_engine(binding), "prompt_tokens_by_source")
    assert sources.keys() == {"local_compute", "local_cache_hit", "external_kv_transfer"}


def test_a_label_value_may_be_prose_with_commas() -> None:
    reason = "waiting for capacity, deferred"
    body = recorded(BUSY).replace('reason="capacity"', f'reason="{reason}"')
    page, binding = resolved(body)
    by_reason = only_engine(binding).gauges["num_requests_waiting_by_reason"]
    assert {slot.labels for slot in by_reason} == {
        (("reason", reason),), (("reason", "deferred"),)
    }  # fmt: skip
    assert len(page.layout.series) == len(resolved(recorded(BUSY))[0].layout.series)


def ray_page(*replicas: str) -> str:
    """Ray's agent page of a node: no times of creation, no counters that are 0."""
    body = ""
    for number, replica in enumerate(replicas):
        labels = {**RAY, "ReplicaId": replica, "WorkerId": f"w{number}"}
        body += running(labelled(recorded(BUSY), **labels), number + 1)
    body = re.sub(r"(?m)^vllm:\w+_created\{.*\n", "", body)
    body = re.sub(r"(?m)^vllm:\w+_total\{.*\} 0\.0\n", "", body)
    return prefixed(body, "ray_vllm_")


def test_ray_replicas_of_one_page_are_told_apart() -> None:
    assert running_by_engine(ray_page("r1", "r2", "r3")) == {
        ("tiny", "0", "r1"): 1,
        ("tiny", "0", "r2"): 2,
        ("tiny", "0", "r3"): 3,
    }


def test_one_ray_replica_needs_no_name_and_its_absent_counters_are_0() -> None:
    _, binding = resolved(ray_page("r1"))
    assert only_engine(binding).key == EngineKey("tiny", "0")
    assert only_engine(binding).created == ()
    assert "num_preemptions" in only_engine(binding).zeros


def test_outside_ray_serve_the_worker_tells_replicas_apart() -> None:
    assert running_by_engine(ray_page("", "")) == {("tiny", "0", "w0"): 1, ("tiny", "0", "w1"): 2}


def test_pods_of_a_federated_page_are_told_apart() -> None:
    body = "".join(
        running(labelled(recorded(BUSY), namespace="llm", pod=pod, instance=f"{pod}:8000"), count)
        for pod, count in (("a", 1), ("b", 2))
    )
    assert running_by_engine(body) == {("tiny", "0", "a"): 1, ("tiny", "0", "b"): 2}


def test_as_many_labels_are_taken_as_it_takes() -> None:
    body = "".join(
        running(labelled(recorded(BUSY), cluster=cluster, pod=pod), count)
        for count, (cluster, pod) in enumerate((("x", "a"), ("x", "b"), ("y", "a")))
    )
    assert running_by_engine(body) == {
        ("tiny", "0", "a/x"): 0,
        ("tiny", "0", "a/y"): 2,
        ("tiny", "0", "b/x"): 1,
    }


def test_a_series_that_says_less_joins_one_that_says_more() -> None:
    b = 'vllm:num_requests_running{{engine="0",model_name="b",pod="{}"}} 1\n'
    body = b.format("p") + b.format("q") + 'vllm:num_requests_waiting{model_name="a"} 5\n'
    body += 'vllm:num_requests_running{model_name="a",pod="p"} 4\n'
    page, binding = resolved(body)
    assert [engine.key for engine in binding.engines] == [
        EngineKey("a", "0", "p"),
        EngineKey("b", "0", "p"),
        EngineKey("b", "0", "q"),
    ]
    assert values(page, binding.engines[0], "num_requests_waiting") == {"": 5}


def test_repeated_lines_count_once() -> None:
    ours = "".join(line + "\n" for line in recorded(BUSY).splitlines() if line.startswith("vllm:"))
    page, binding = resolved(recorded(BUSY) + ours)
    assert page.layout.repeated
    engine = only_engine(binding)
    for metric, kind in kinds(engine).items():
        if kind != "histogram":
            positions = {slot.position for slot in (*engine.gauges.get(metric, ()),)}
            assert not positions & page.layout.repeated


def test_engines_without_end_are_refused_at_once() -> None:
    body = "".join(
        f'vllm:num_requests_running{{model_name="m",engine="{number}"}} 1\n'
        for number in range(10_000)
    )
    with pytest.raises(CollectError, match="more than 1024 engines") as caught:
        resolved(body)
    assert caught.value.kind == "too_large"


def test_a_layout_is_refused_once() -> None:
    body = "".join(
        f'vllm:num_requests_running{{model_name="m",engine="{number}"}} 1\n'
        for number in range(2_000)
    )
    page = parse(body)
    errors = list[CollectError]()

    def refuse() -> None:
        with pytest.raises(CollectError) as caught:
            resolve(page.layout)
        errors.append(caught.value)

    assert calls(refuse) > 50 * calls(refuse)
    assert str(errors[0]) == str(errors[1])


def test_names_without_end_are_refused() -> None:
    with pytest.raises(CollectError, match="more than 1024 characters") as caught:
        resolved(f'vllm:num_requests_running{{model_name="{"m" * 5000}",engine="0"}} 1\n')
    assert caught.value.kind == "too_large"
