"""Whose a GPU is."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.agent.fleet.snapshot import images_of, readings_of, with_gpus
from kneewatch.collector.prometheus.responses import Sample
from kneewatch.diagnose.ranking import ranked
from tests.diagnose.fleet.example_fleets import pod, shaped
from tests.diagnose.situations import CONCLUSIVE


def gpu(value: float, **labels: str) -> Sample:
    return Sample({"modelName": "NVIDIA H100 80GB HBM3", **labels}, value)


def clocks(*samples: Sample, cluster: tuple[str, ...] = ("eu", "us")) -> dict[str, float]:
    """The clock of pod a in each cluster, by DCGM's samples."""
    shape = shaped([pod("a", cluster=cluster, node="n") for cluster in cluster])
    answers = {"sm_clock_mhz": samples, "temperature_c": ()}
    by_member = with_gpus(shape, answers)[1]
    return {
        m.labels["cluster"]: by_member[m.key]["sm_clock_mhz"]
        for m in shape.members
        if m.key in by_member
    }


def test_pods_of_one_name_in_two_clusters_have_their_own_gpus() -> None:
    eu, us = ({"cluster": cluster, "namespace": "prod", "pod": "a"} for cluster in ("eu", "us"))
    assert clocks(gpu(600.0, **eu), gpu(1980.0, **us)) == {"eu": 600.0, "us": 1980.0}
    assert clocks(gpu(600.0, **eu)) == {"eu": 600.0}, "of the other nothing is known"


def test_an_xid_is_that_of_its_gpu_and_not_of_another_pod() -> None:
    shape = shaped([pod("a", node="n"), pod("b", node="n")])
    a, b = ({"Hostname": "n", "namespace": "prod", "pod": name} for name in "ab")
    answers = {
        "sm_clock_mhz": (gpu(1980.0, **a), gpu(1980.0, **b)),
        "xid": (gpu(79.0, **a, gpu="0"), gpu(48.0, **a, gpu="1")),
        "xid_new": (gpu(1.0, **a, gpu="1"),),
        "xid_worked": (gpu(79.0, **a, gpu="0"),),
    }
    _, figures, faulty = with_gpus(shape, answers)
    of_a, of_b = (member.key for member in shape.members)
    assert [(g.name, x.code, x.since_s, x.worked_since) for g in faulty[of_a] for x in g.xids] == [
        ("GPU 0 of n", 79, None, True),
        ("GPU 1 of n", 48, 0.0, False),
    ]
    assert (figures[of_a]["xid"], faulty[of_b]) == (79.0, ())


def test_the_clock_is_compared_with_its_own_where_no_other_replica_shows_what_is_usual() -> None:
    a, b = ({"namespace": "prod", "pod": name} for name in "ab")
    answers = {
        "sm_clock_mhz": (gpu(900.0, **a), gpu(1980.0, **b)),
        "usual_clock_mhz": (gpu(1980.0, **a), gpu(1980.0, **b)),
        "gpus": (gpu(1.0, **a), gpu(1.0, **b)),
    }
    alone = shaped([pod("a", node="n"), pod("b", node="n", model_name="other")])
    of_a, of_b = readings_of(*with_gpus(alone, answers)).values()
    slow = replace(CONCLUSIVE["slow_steps"].but(running_avg=8.0), gpus=of_a.states)
    (cause,) = ranked(list(slow.causes().values()))
    assert (cause.id, cause.explains) == ("gpu_throttled", ("slow_steps",))
    assert cause.summary.startswith("GPU of n is throttled to 45% of its clock")
    as_usual = replace(slow, gpus=of_b.states)
    assert "gpu_throttled" not in as_usual.causes()
    assert "gpu_throttled" not in slow.but(running_avg=0.0).causes(), "an idle GPU's clock falls"
    beside = readings_of(*with_gpus(shaped([pod("a", node="n"), pod("b", node="n")]), answers))
    assert [reading.states for reading in beside.values()] == [(), ()]


def test_nodes_of_one_name_in_two_clusters_too() -> None:
    eu, us = ({"cluster": cluster, "Hostname": "n"} for cluster in ("eu", "us"))
    assert clocks(gpu(600.0, **eu), gpu(1980.0, **us)) == {"eu": 600.0, "us": 1980.0}


def test_an_exporter_that_names_no_cluster_is_joined_by_pod() -> None:
    assert clocks(gpu(600.0, namespace="prod", pod="a"), cluster=("eu",)) == {"eu": 600.0}


def test_the_pod_of_an_older_scrape_configuration_is_joined_too() -> None:
    own = {"kubernetes_namespace": "prod", "kubernetes_pod_name": "a", "instance": "10.0.0.1:8000"}
    exporter = {"kubernetes_namespace": "gpu", "kubernetes_pod_name": "dcgm-exporter-x"}
    shape = shaped([{**own, "model_name": "m"}])
    (member,) = shape.members
    answers = {"sm_clock_mhz": [gpu(600.0, namespace="prod", pod="a", **exporter)]}
    assert member.replica == "a"
    assert with_gpus(shape, answers)[1] == {member.key: {"sm_clock_mhz": 600.0}}


# --- Images, by kube-state-metrics ----------------------------------------------------------------


def container(image: str, name: str = "vllm", **labels: str) -> Sample:
    place = {"namespace": "prod", "pod": "a", "container": name}
    return Sample({**place, "image": image, **labels}, 1.0)


def images(*samples: Sample, **labels: str) -> list[str]:
    return list(images_of(shaped([pod("a", **labels)]).members, samples).values())


def test_an_engine_has_the_image_of_its_pod() -> None:
    assert images(container("vllm:v1"), container("vllm:v2", pod="b")) == ["vllm:v1"]
    assert images(container("vllm:v1", namespace="test")) == []
    asked_for = container("sha256:00", image_spec="vllm:v1")
    assert images(asked_for) == ["vllm:v1"], "what the pod asks for names the release"


def test_without_honor_labels_the_pod_is_the_exported_one() -> None:
    scraped = {"exported_namespace": "prod", "exported_pod": "a", "exported_container": "vllm"}
    own = {"namespace": "monitoring", "pod": "kube-state-metrics-0", "container": "ksm"}
    assert images(Sample({**own, **scraped, "image": "vllm:v1"}, 1.0)) == ["vllm:v1"]


def test_of_several_images_only_the_engines_own_counts() -> None:
    both = container("vllm:v1"), container("vllm-router:v7", name="router")
    assert images(*both) == []
    assert images(*both, container="vllm") == ["vllm:v1"]
