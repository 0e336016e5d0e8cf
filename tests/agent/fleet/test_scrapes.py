"""Whose scrape fails, where addresses are there twice."""

from __future__ import annotations

from kneewatch.agent.fleet.presence import TargetSet

UP = {"__name__": "up", "job": "vllm", "instance": "10.0.0.1:8000", "cluster": "eu", "pod": "c-1"}
PAGE = {**UP, "__name__": "vllm:num_requests_running", "model_name": "m", "engine": "0"}


def test_an_address_that_two_clusters_have_fails_in_one() -> None:
    failing = TargetSet([UP])
    assert PAGE in failing
    assert {**PAGE, "cluster": "us"} not in failing
    assert PAGE in TargetSet([{**UP, "cluster": "us"}, UP])


def test_a_pod_that_took_the_address_of_another_is_not_the_one_that_fails() -> None:
    assert {**PAGE, "pod": "c-2"} not in TargetSet([UP])


def test_labels_that_only_one_of_them_has_decide_nothing() -> None:
    bare = {"job": "vllm", "instance": "10.0.0.1:8000"}
    assert PAGE in TargetSet([bare])
    assert bare in TargetSet([UP])
    assert {**bare, "job": "other"} not in TargetSet([UP])
