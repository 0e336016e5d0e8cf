"""The workload that a pod belongs to, by its name."""

from __future__ import annotations

import pytest

from kneewatch.agent.fleet.presence import Objects, is_worker, workloads_of


@pytest.mark.parametrize(
    ("pod", "workloads"),
    [
        ("chat-7d9f8c6b54-x2x4z", {"chat"}),
        ("chat-v2-7d9f8c6b54-x2x4z", {"chat-v2"}),
        ("chat-0", {"chat"}),
        ("chat-0-1", {"chat-0", "chat"}),
        ("10.0.0.1:8000", set[str]()),
        ("", set[str]()),
    ],
)
def test_the_workloads_that_a_pod_may_be_of(pod: str, workloads: set[str]) -> None:
    assert workloads_of(pod) == workloads


def test_a_worker_is_named_after_its_leader() -> None:
    assert is_worker("chat-0-1", {"chat-0"})
    assert not is_worker("chat-1", {"chat-0"})


@pytest.mark.parametrize(
    ("cluster", "is_there"),
    [pytest.param("a", True), pytest.param("b", False), pytest.param("", True, id="not known")],
)
def test_an_object_is_of_a_cluster(cluster: str, is_there: bool) -> None:
    zero = Objects([({"cluster": "a", "namespace": "x", "exported_namespace": "chat"}, "llama")])
    labels = {"namespace": "chat"} | ({"cluster": cluster} if cluster else {})
    assert zero.has(labels, "llama") == is_there
    assert not zero.has(labels, "mistral")


def test_an_object_without_a_cluster_is_of_any() -> None:
    assert Objects([({"namespace": "chat"}, "llama")]).has(
        {"namespace": "chat", "cluster": "a"}, "llama"
    )
