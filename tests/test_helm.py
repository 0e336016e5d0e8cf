"""The Helm chart: it renders to the objects of the Kustomize base, with the values put in."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_kubernetes import ROOT, check, example, only, ours, pods
from tests.test_release import release

helm: Any = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
__all__ = ["example", "release"]

Object = dict[str, Any]
HASHED = r'("kneewatch-(?:settings|metrics-system))-[a-z0-9]{10}(?=")'
"""ConfigMaps whose names have a hash of their content in Kustomize."""


@pytest.fixture(scope="module")
def chart(release: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ANN401
    """The chart as a release packs it."""
    path = tmp_path_factory.mktemp("chart") / "kneewatch-chart.tgz"
    path.write_bytes(release.tarred(release.chart_files(), 500))
    return path


def templated(
    chart: Path, values: Mapping[str, Any], namespace: str = "monitoring"
) -> list[Object]:
    """The objects of the chart with these values, each valid."""
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render(dict(values), name="kneewatch", namespace=namespace)
    objects = [
        obj for text in texts.values() for obj in yaml.load_all(text, yaml.CSafeLoader) if obj
    ]
    for obj in objects:
        check(obj)
    return objects


def plain(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Objects by kind and name, without what only one of the two tools adds."""
    by_name: dict[tuple[str, str], Object] = {}
    for obj in objects:
        text = re.sub(HASHED, r"\1", json.dumps(obj))
        obj = json.loads(text)
        obj.get("spec", {}).get("template", {}).get("metadata", {}).pop("annotations", None)
        by_name[obj["kind"], obj["metadata"]["name"]] = obj
    return by_name


def test_the_chart_has_the_objects_of_the_example(chart: Path, example: list[Object]) -> None:
    values = {
        "image": {"repository": "registry.example/kneewatch"},
        "labels": {"release": "prometheus", "team": "inference"},
        "prometheus": {"selector": 'namespace=~"chat|search"'},
    }
    here, there = plain(templated(chart, values)), plain(example)
    assert here.keys() == there.keys()
    for name, obj in here.items():
        assert obj == there[name], name


def test_the_rules_are_those_of_the_engines(chart: Path) -> None:
    def rules(engines: list[str]) -> Object:
        spec: Object = only(templated(chart, {"engines": engines}), "PrometheusRule")["spec"]
        return spec

    alone = rules(["vllm"])["groups"]
    both = rules(["sglang", "vllm"])["groups"]
    assert both[: len(alone)] == alone
    names = [group["name"] for group in both]
    assert names[len(alone) :] == ["kneewatch-sglang", "kneewatch-signals-sglang"]
    other = rules(["tensorrt-llm", "sglang"])["groups"]
    assert [group["name"] for group in other][:3] == [
        "kneewatch-alerts", "kneewatch-own", "kneewatch-tensorrt-llm",
    ]  # fmt: skip
    assert "vllm:" not in json.dumps(other)
    monitors = [
        (obj["metadata"]["name"], obj["spec"]["podMetricsEndpoints"][0]["path"])
        for obj in templated(chart, {"engines": ["sglang", "tensorrt-llm"]})
        if obj["kind"] == "PodMonitor"
    ]
    assert monitors == [("sglang", "/metrics"), ("tensorrt-llm", "/prometheus/metrics")]
    with pytest.raises(Exception, match="no rules for"):
        templated(chart, {"engines": ["tgi"]})


def test_values_reach_the_objects(chart: Path) -> None:
    values = {
        "prometheus": {"tokenSecret": "mimir"},
        "secrets": ["slack"],
        "pod": {"nodeSelector": {"pool": "cpu"}},
        "volumeClaim": {"storageClassName": "fast"},
        "resources": {"limits": {"memory": "2Gi"}},
        **dict.fromkeys(("serviceMonitor", "podMonitor", "rules", "dashboards"), False),
    }
    objects = templated(chart, values, namespace="chat")
    kinds = {obj["kind"] for obj in objects}
    assert not {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Role", "Secret"} & kinds
    assert sum(obj["kind"] == "ConfigMap" for obj in objects) == 2
    pod = pods(objects)["kneewatch"]
    assert pod["nodeSelector"] == {"pool": "cpu"}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"][-2:]}
    assert secrets == {"slack": "slack", "mimir": "mimir"}
    mounts = {mount["name"]: mount["mountPath"] for mount in ours(pod)["volumeMounts"]}
    assert mounts["slack"] == "/etc/kneewatch/slack"
    assert ours(pod)["env"][-1]["value"] == f"{mounts['mimir']}/token"
    assert ours(pod)["resources"] == {"limits": {"memory": "2Gi"}}
    assert only(objects, "PersistentVolumeClaim")["spec"]["storageClassName"] == "fast"
    (settings,) = (obj for obj in objects if obj["metadata"]["name"] == "kneewatch-settings")
    assert '"kneewatch.chat.svc"' in settings["data"]["kneewatch.toml"]


def test_helm_finds_no_fault(chart: Path) -> None:
    assert helm.lint(str(chart))["errors"] == []
    with helm.Chart.load(str(chart)) as loaded:
        metadata = loaded.metadata
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["version"] == metadata["appVersion"] == project["version"]
