"""Alerts and targets: what is matched, by what, and what is not."""

from __future__ import annotations

import pytest

from kneewatch.agent.api.alerts import Candidate, match


def candidate(name: str, address: str, model: str = "tiny", **labels: str) -> Candidate:
    return Candidate(name, address, labels, frozenset({model}), frozenset({"0", "1"}))


A = candidate("a", "http://gpu-7:8000", tier="chat", namespace="ml", pod="vllm-0")
B = candidate("b", "gpu-7:8001", tier="chat", namespace="ml", pod="vllm-1")
C = candidate("c", "https://api.example/v1/metrics", model="large", job="edge")
LOCAL = candidate("local", "http://localhost:8000")
NAMED = candidate("named", "http://svc.ml:8000", instance="10.0.0.9:8000")


@pytest.mark.parametrize(
    ("labels", "targets", "by"),
    [
        pytest.param({"instance": "gpu-7:8000"}, "a", "instance=gpu-7:8000", id="address"),
        pytest.param({"instance": "GPU-7:8000"}, "a", "instance=GPU-7:8000", id="case of a host"),
        pytest.param(
            {"instance": "http://gpu-7:8001/metrics"}, "b", "instance=", id="address as a URL"
        ),
        pytest.param({"instance": "api.example:443"}, "c", "instance=", id="port by the scheme"),
        pytest.param({"instance": "127.0.0.1:8000"}, "local", "instance=", id="loopback by number"),
        pytest.param({"instance": "10.0.0.9:8000"}, "named", "instance=", id="stated by the user"),
        pytest.param({"kneewatch_target": "b"}, "b", "kneewatch_target=b", id="name"),
        pytest.param({"pod": "vllm-1", "namespace": "ml"}, "b", "pod=vllm-1", id="pod"),
        pytest.param(
            {
                "pod": "dcgm-x",
                "exported_pod": "vllm-0",
                "namespace": "gpu",
                "exported_namespace": "ml",
            },
            "a",
            "pod=vllm-0",
            id="the workload's pod, not the exporter's",
        ),
        pytest.param(
            {"pod": "vllm-0", "instance": "10.2.3.4:8000"},
            "a",
            "pod=vllm-0",
            id="a pod by its own address",
        ),
        pytest.param({"instance": "gpu-7:9400"}, "a b", "host of instance=", id="GPU exporter"),
        pytest.param({"model_name": "large"}, "c", "model_name=large", id="model"),
        pytest.param(
            {"model_name": "tiny", "tier": "chat"}, "a b local named", "tier=chat", id="model, tier"
        ),
        pytest.param({"job": "edge"}, "c", "job=edge", id="job"),
        pytest.param({"tier": "chat", "engine": "1"}, "a b", "tier=chat", id="engine it has"),
    ],
)
def test_what_is_matched(labels: dict[str, str], targets: str, by: str) -> None:
    matching = match({"alertname": "X", **labels}, [A, B, C, LOCAL, NAMED])
    assert [hit.target for hit in matching.targets] == targets.split()
    assert any(reason.startswith(by) for hit in matching.targets for reason in hit.by)
    assert by in matching.text


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        pytest.param({}, "any of these labels (none)", id="no labels"),
        pytest.param({"engine": "0"}, "any of these labels (engine)", id="engine alone"),
        pytest.param({"severity": "page"}, "(none)", id="severity"),
        pytest.param(
            {"instance": "gpu-8:8000", "tier": "chat"}, "instance=gpu-8:8000", id="another"
        ),
        pytest.param({"tier": "chat", "engine": "7"}, "engine=7 differs", id="no such engine"),
        pytest.param({"pod": "vllm-9", "namespace": "ml"}, "pod=vllm-9 differs", id="another pod"),
        pytest.param(
            {"instance": "gpu-7:8000", "model_name": "huge"}, "model_name=huge", id="model"
        ),
        pytest.param({"instance": "not an address"}, "no match", id="no address"),
        pytest.param({"cluster": "x"}, "any of these labels (cluster)", id="unknown label"),
    ],
)
def test_what_is_not(labels: dict[str, str], said: str) -> None:
    matching = match({"alertname": "X", **labels}, [A, B])
    assert matching.targets == ()
    assert matching.text.startswith("no match")
    assert said in matching.text


def test_what_identifies_goes_before_what_is_shared() -> None:
    matching = match({"instance": "gpu-7:8000", "tier": "chat"}, [A, B])
    assert [(hit.target, hit.exact) for hit in matching.targets] == [("a", True)]
    shared = match({"tier": "chat"}, [A, B])
    assert [(hit.target, hit.exact) for hit in shared.targets] == [("a", False), ("b", False)]
    assert shared.text == "matched 2 targets by shared labels: tier=chat"
    alone = match({"tier": "chat"}, [A])
    assert "no label of the alert names a target" in alone.text


def test_loopback_is_not_one_machine_for_all() -> None:
    assert match({"instance": "localhost:9090"}, [LOCAL]).targets == ()
    assert match({"instance": "10.0.0.1:8000", "model_name": "tiny"}, [LOCAL]).targets != ()


def test_no_targets() -> None:
    assert match({"instance": "x:1"}, []).text == "no match: no target is watched"


def test_which_engine_is_meant() -> None:
    matching = match({"instance": "gpu-7:8000", "engine": "1", "model_name": "tiny"}, [A])
    assert (matching.model, matching.engine) == ("tiny", "1")
