"""Replicas, engines, pools and tiers from labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.fleet.inventory import RECORDED, distinguishing, label_map, shape_of
from tests.diagnose.fleet.example_fleets import pod, shaped

PLAIN = label_map({}, "default")


def test_kubernetes_pods() -> None:
    shape = shaped([pod("a", tier="h100"), pod("b", tier="a100")])
    assert [(m.replica, m.pool, m.tier, m.engine) for m in shape.members] == [
        ("b", "prod/m", "a100", ""),
        ("a", "prod/m", "h100", ""),
    ]
    assert shape.by == ("instance",)
    assert set(shape.by) <= set(RECORDED)


def test_data_parallel_engines_are_engines_of_one_replica() -> None:
    shape = shaped([pod("a", engine=str(at)) for at in range(4)])
    assert {m.replica for m in shape.members} == {"a"}
    assert [m.name for m in shape.members] == [f"a engine {at}" for at in range(4)]


def test_ray_replicas_behind_one_metrics_port() -> None:
    rows = [
        {"instance": "head:8080", "ReplicaId": f"r{at}", "model_name": "m", "WorkerId": f"w{at}"}
        for at in range(3)
    ]
    shape = shaped(rows)
    assert [m.replica for m in shape.members] == ["r0", "r1", "r2"]
    assert not set(shape.by) <= set(RECORDED), "the recording rules' labels cannot tell these apart"


def test_plain_servers_go_by_their_address() -> None:
    shape = shaped([{"instance": f"h{at}:8000", "model_name": "m"} for at in range(2)])
    assert [m.replica for m in shape.members] == ["h0:8000", "h1:8000"]


def test_the_same_pod_name_in_two_namespaces_is_two_replicas() -> None:
    shape = shaped([pod("a"), {**pod("a"), "namespace": "dev", "instance": "other:8000"}])
    assert [m.replica for m in shape.members] == ["dev/a", "prod/a"]


def test_a_stated_label_comes_first_and_the_defaults_after_it() -> None:
    rows = [pod("a", app="x", sku="B200"), pod("b", app="y", sku="H100", server="s1")]
    names = label_map({"pool": "app", "tier": "gpu_type, sku", "replica": "server"}, "flag")
    assert [(m.pool, m.tier, m.replica) for m in shape_of(rows, names).members] == [
        ("x", "B200", "a"),
        ("y", "H100", "s1"),
    ]


def test_a_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"fleet.labels \(flag\): no part 'rack'"):
        label_map({"rack": "rack"}, "flag")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(("instance", "pod", "engine", "zone", "le", "__name__")),
            st.sampled_from("abc"),
        ),
        max_size=12,
    )
)
def test_keys_tell_all_series_apart(rows: list[dict[str, str]]) -> None:
    shape = shape_of(rows, PLAIN)
    ignored = {"le", "__name__"}
    distinct = {tuple(sorted((k, v) for k, v in r.items() if k not in ignored)) for r in rows}
    assert len({member.key for member in shape.members}) == len(shape.members) == len(distinct)
    for row in rows:
        assert shape.key(row) in {member.key for member in shape.members}


def test_no_more_labels_than_needed() -> None:
    assert distinguishing([{"instance": "a", "pod": "a"}, {"instance": "b", "pod": "b"}]) == (
        "instance",
    )
