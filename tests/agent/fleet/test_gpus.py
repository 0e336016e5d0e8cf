"""Whose a GPU is."""

from __future__ import annotations

from kneewatch.agent.fleet.snapshot import with_gpus
from kneewatch.collector.prometheus.responses import Sample
from tests.diagnose.fleet.made import pod, shaped


def gpu(value: float, **labels: str) -> Sample:
    return Sample({"modelName": "NVIDIA H100 80GB HBM3", **labels}, value)


def clocks(*samples: Sample, cluster: tuple[str, ...] = ("eu", "us")) -> dict[str, float]:
    """The clock of pod a in each cluster, by DCGM's samples."""
    shape = shaped([pod("a", cluster=one, node="n") for one in cluster])
    answers = {"sm_clock_mhz": samples, "temperature_c": (), "xid": (), "gpus": ()}
    found = with_gpus(shape, answers)[1]
    return {
        m.labels["cluster"]: found[m.key]["sm_clock_mhz"] for m in shape.members if m.key in found
    }


def test_pods_of_one_name_in_two_clusters_have_their_own_gpus() -> None:
    eu, us = ({"cluster": one, "namespace": "prod", "pod": "a"} for one in ("eu", "us"))
    assert clocks(gpu(600.0, **eu), gpu(1980.0, **us)) == {"eu": 600.0, "us": 1980.0}
    assert clocks(gpu(600.0, **eu)) == {"eu": 600.0}, "of the other nothing is known"


def test_nodes_of_one_name_in_two_clusters_too() -> None:
    eu, us = ({"cluster": one, "Hostname": "n"} for one in ("eu", "us"))
    assert clocks(gpu(600.0, **eu), gpu(1980.0, **us)) == {"eu": 600.0, "us": 1980.0}


def test_an_exporter_that_names_no_cluster_is_joined_by_pod() -> None:
    assert clocks(gpu(600.0, namespace="prod", pod="a"), cluster=("eu",)) == {"eu": 600.0}
