"""The queries that a fleet is asked."""

from __future__ import annotations

import pytest

from kneewatch.agent.fleet.queries import (
    QueryScope,
    checked_selector,
    gpu_queries,
    hourly_queries,
    presence,
)
from kneewatch.collector.errors import SettingsError

ASKING = QueryScope('namespace="a"', 60.0, ("instance", "engine"), ("vllm:",))


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("", ""),
        ('namespace="a"', 'namespace="a"'),
        (' {namespace="a",pod=~"x.*"} ', 'namespace="a",pod=~"x.*"'),
        ('pod=~"x{2}(a|b)",', 'pod=~"x{2}(a|b)"'),
        (r'pod="a\"}"', r'pod="a\"}"'),
        ("pod='a', job!~`b|(c)` , ", "pod='a', job!~`b|(c)`"),
    ],
)
def test_matchers_with_or_without_braces(text: str, inner: str) -> None:
    assert checked_selector(text, "--selector") == inner


@pytest.mark.parametrize(
    "text",
    [
        "up",
        'a="b"} or vector(1',
        'a="b',
        "sum(x)",
        '{a="b"}}',
        "a=b",
        'a="b" or c="d"',
        'a="b",,c="d"',
        'a="b" c="d"',
        '1a="b"',
    ],
)
def test_what_is_no_list_of_matchers_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--selector"):
        checked_selector(text, "--selector")


def test_each_signal_has_one_query_and_each_is_restricted() -> None:
    queries = hourly_queries(ASKING)
    for key, query in queries.items():
        assert query.count('namespace="a"') == query.count("vllm:"), key
        assert "instance, engine" in query, key
    assert 'namespace="a"' in presence(ASKING)


def test_two_spellings_in_one_fleet_are_one_query() -> None:
    both = hourly_queries(QueryScope("", 60.0, ("instance",), ("vllm:", "ray_vllm_")))
    assert "ray_vllm_request_prompt_tokens" in both["prompt_tokens_mean"]
    assert "(vllm:request_prompt_tokens" in both["prompt_tokens_mean"]
    assert both["prompt_tokens_mean"].count(" or ") == 1


@pytest.mark.parametrize(
    ("selector", "matchers"),
    [
        ("", ()),
        ('namespace="a"', ('exported_namespace="a"',)),
        ('pod=~"x{1,2}",model_name="m"', ('exported_pod=~"x{1,2}"',)),
        ("namespace='a', pod!=`b`", ("exported_namespace='a'", "exported_pod!=`b`")),
        (r'model_name="a,b\"",namespace!="c"', ('exported_namespace!="c"',)),
        ('model_name="m"', ()),
    ],
)
def test_gpus_are_restricted_where_their_labels_say_the_workload(
    selector: str, matchers: tuple[str, ...]
) -> None:
    for query in gpu_queries(QueryScope(selector, 60.0)).values():
        assert "model_name=" not in query
        for matcher in matchers:
            assert query.count(matcher) == 1
        assert query.count('exported_pod=""') == (1 if matchers else 0), "bare GPUs are kept"
