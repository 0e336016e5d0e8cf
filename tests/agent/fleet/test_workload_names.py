"""The workload that a pod belongs to, by its name."""

from __future__ import annotations

import pytest

from kneewatch.agent.fleet.workload_names import is_worker, workloads_of


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
