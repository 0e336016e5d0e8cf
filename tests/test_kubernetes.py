"""The Kubernetes files: every combination renders to objects that Kubernetes accepts, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kneewatch.agent.cli import cli
from kneewatch.agent.settings.effective import Settings, load
from tests.programs import require

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "packaging" / "kubernetes"
SETTINGS = {
    "kneewatch-settings": FOLDER / "fleet" / "kneewatch.toml",
    "kneewatch-sidecar": FOLDER / "sidecar" / "kneewatch.toml",
    "kneewatch-node-settings": FOLDER / "node" / "kneewatch.toml",
}
KUBECTL = (1, 22)
"""The first kubectl whose Kustomize has components and labels."""

KUBERNETES = "1.29"
"""The version whose definitions the objects must fit; later ones take what it takes."""

WORKLOADS = [
    {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": kind.lower(), "labels": {"kneewatch-sidecar": watched}},
        "spec": {
            "selector": {"matchLabels": {"app": kind}},
            **({"serviceName": "vllm"} if kind == "StatefulSet" else {}),
            "template": {
                "metadata": {"labels": {"app": kind}},
                "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai"}]},
            },
        },
    }
    for kind, watched in (("Deployment", "true"), ("StatefulSet", "true"), ("ReplicaSet", "false"))
]
VLLM_POD = {
    "containers": [{"name": "vllm", "image": "vllm/vllm-openai"}],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
}
LEADERS = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "pipeline", "labels": {"kneewatch-sidecar": "true"}},
    "spec": {
        "replicas": 2,
        "leaderWorkerTemplate": {
            "size": 2,
            "leaderTemplate": {"spec": VLLM_POD},
            "workerTemplate": {"spec": VLLM_POD},
        },
    },
}


def table(required: Iterable[str] = (), **properties: Any) -> dict[str, Any]:  # noqa: ANN401
    """A schema of an object that has these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = table(matchLabels=TEXTS)
SECRET = table(("name", "key"), name=TEXT, key=TEXT)
ENDPOINT: dict[str, Any] = {
    "port": TEXT,
    "path": {"type": "string", "pattern": "^/"},
    "interval": {"type": "string", "pattern": "^[0-9]+s$"},
    "authorization": table(type=TEXT, credentials=SECRET),
}
SPECS = {
    "ServiceMonitor": table(
        ("selector", "endpoints"),
        selector=SELECTOR,
        endpoints={"type": "array", "items": table(**ENDPOINT)},
    ),
    "PodMonitor": table(
        ("selector", "podMetricsEndpoints"),
        selector=SELECTOR,
        namespaceSelector=table(any={"type": "boolean"}),
        podMetricsEndpoints={"type": "array", "items": table(**ENDPOINT)},
    ),
    "PrometheusRule": table(("groups",), groups={"type": "array", "items": {"type": "object"}}),
}
"""The fields of the Prometheus operator's kinds (version 0.82) that are used here."""


@cache
def kubectl() -> str:
    """The path of kubectl. Where there is none, or an old one (Debian 12's), the test is skipped,
    in CI too: no package of Debian 12 has a new one."""
    path = shutil.which("kubectl")
    if path is None:
        pytest.skip("kubectl is not installed: the Kubernetes files are not rendered")
    client = subprocess.run(
        [path, "version", "--client", "--output=json"], capture_output=True, text=True, check=True
    )
    version = json.loads(client.stdout)["clientVersion"]
    if (int(version["major"]), int(version["minor"].rstrip("+"))) < KUBECTL:
        pytest.skip(
            f"kubectl {version['gitVersion']} is too old: it knows no components and labels"
        )
    return path


def rendered(folder: Path, kustomization: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(dict(kustomization)))
    command = [kubectl(), "kustomize", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.load_all(ran.stdout, yaml.CSafeLoader))


def at(path: str, folder: Path) -> str:
    """A folder of packaging/kubernetes, as a kustomization in `folder` names it."""
    return os.path.relpath(FOLDER / path, folder.resolve())


def check(obj: Mapping[str, Any]) -> None:
    """Fail for an object that its kind does not allow, or that server-side apply cannot merge."""
    own = [*ours(pod)["ports"]] if (pod := pods([obj]).get("kneewatch")) else []
    own += obj["spec"]["ports"] if obj["kind"] == "Service" else []
    # The keys of a list: older API servers put in no default.
    assert all("protocol" in port for port in own), own
    if obj["apiVersion"] == "monitoring.coreos.com/v1":
        jsonschema.validate(obj["spec"], SPECS[obj["kind"]])
        return
    if obj["kind"] == "LeaderWorkerSet":
        leader = obj["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        obj = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "leader"}, **leader}
    kubernetes_validate.validate(dict(obj), KUBERNETES, strict=True)


def pods(objects: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specifications by the name of their workload."""
    specs: dict[str, dict[str, Any]] = {}
    for obj in objects:
        spec = obj.get("spec", {})
        if "leaderWorkerTemplate" in spec:
            specs[obj["metadata"]["name"]] = spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
        elif "template" in spec:
            specs[obj["metadata"]["name"]] = spec["template"]["spec"]
    return specs


def ours(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The container kneewatch of a pod."""
    (container,) = [
        container_spec
        for container_spec in pod["containers"]
        if container_spec["name"] == "kneewatch"
    ]
    return dict(container)


def only(objects: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """The object of a kind."""
    (obj,) = [obj for obj in objects if obj["kind"] == kind]
    return obj


SMALL = ("prometheus-token", "service-monitor", "pod-monitor")
"""Components without much text: the example has all of the others."""

COMBINATIONS = list(chain.from_iterable(combinations(SMALL, count) for count in range(4)))


@pytest.mark.parametrize("components", COMBINATIONS)
def test_every_combination_renders(components: tuple[str, ...], tmp_path: Path) -> None:
    kustomization = {
        "resources": [at("fleet", tmp_path)],
        "components": [at(component, tmp_path) for component in components],
        "namespace": "inference",
        "labels": [{"pairs": {"release": "mine"}}],
    }
    objects = rendered(tmp_path, kustomization)
    for obj in objects:
        check(obj)
        assert obj["metadata"]["namespace"] == "inference"
        assert obj["metadata"]["labels"]["release"] == "mine"
    kinds = [obj["kind"] for obj in objects]
    assert not {"ClusterRole", "ClusterRoleBinding", "Role", "Secret"} & set(kinds)
    assert kinds.count("ServiceMonitor") == ("service-monitor" in components)
    assert kinds.count("PodMonitor") == ("pod-monitor" in components)
    mounts = {mount["name"] for mount in ours(pods(objects)["kneewatch"])["volumeMounts"]}
    assert ("metrics-system" in mounts) == ("prometheus-token" in components)


@pytest.fixture(scope="module")
def example() -> list[dict[str, Any]]:
    """The objects of the example."""
    command = [kubectl(), "kustomize", str(FOLDER / "example")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.load_all(text, yaml.CSafeLoader))


def test_the_example_is_complete(example: list[dict[str, Any]], tmp_path: Path) -> None:
    for obj in example:
        check(obj)
        assert obj["metadata"]["labels"]["release"] == "prometheus"
    boards = [obj for obj in example if obj["metadata"]["labels"].get("grafana_dashboard")]
    shipped = (ROOT / "dashboards" / "generated" / "grafana").glob("*.json")
    assert {name for board in boards for name in board["data"]} == {path.name for path in shipped}
    assert all(len(str(board["data"])) < 1_000_000 for board in boards)
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.dump(only(example, "PrometheusRule")["spec"], Dumper=yaml.CSafeDumper))
    promtool = [require("promtool"), "check", "rules", str(rules)]
    subprocess.run(promtool, check=True, capture_output=True)
    assert ours(pods(example)["kneewatch"])["image"] == "registry.example/kneewatch:1.1.0"


def test_the_services_names_are_accepted(example: list[dict[str, Any]]) -> None:
    service = only(example, "Service")["metadata"]
    settings = load(file=SETTINGS["kneewatch-settings"], environ={}, flags={})
    name = f"{service['name']}.{service['namespace']}.svc"
    assert {service["name"], name} <= set(settings["http.hosts"])


def test_never_two_replicas_notify(example: list[dict[str, Any]]) -> None:
    deployment = only(example, "Deployment")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert only(example, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in ours(pods(example)["kneewatch"])["volumeMounts"]
    }
    assert mounts["state"] == "/var/lib/kneewatch", "where it records what was sent"
    assert only(example, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_what_is_about_the_pod_selects_no_other(example: list[dict[str, Any]]) -> None:
    labels = only(example, "Deployment")["spec"]["selector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "fleet"
    assert only(example, "Service")["spec"]["selector"] == labels
    assert only(example, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert only(example, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    service = only(example, "Service")["metadata"]["labels"]
    monitored = only(example, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= service.items()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Pods of workloads with the sidecar, by workload."""
    folder = tmp_path_factory.mktemp("sidecar")
    (folder / "workloads.yaml").write_text(yaml.safe_dump_all([*WORKLOADS, LEADERS]))
    kustomization = {
        "resources": ["workloads.yaml"],
        "components": [at("sidecar", folder), at("shared-processes", folder)],
        "images": [{"name": "kneewatch", "newName": "registry.example/kneewatch"}],
        "namespace": "chat",
    }
    objects = rendered(folder, kustomization)
    for obj in objects:
        check(obj)
    configs = {obj["metadata"]["name"] for obj in objects if obj["kind"] == "ConfigMap"}
    assert configs == {"kneewatch-sidecar"}
    return pods(objects)


@pytest.mark.parametrize("workload", ["deployment", "statefulset", "pipeline"])
def test_the_sidecar_joins_the_pods(workload: str, watched: dict[str, dict[str, Any]]) -> None:
    pod = watched[workload]
    assert [container["name"] for container in pod["containers"]] == ["vllm", "kneewatch"]
    assert ours(pod) == ours(watched["deployment"])
    assert ours(pod)["image"].startswith("registry.example/kneewatch:")
    assert "readinessProbe" not in ours(pod), "vLLM's readiness does not depend on the sidecar"
    assert pod["shareProcessNamespace"] is True
    added = [volume for volume in pod["volumes"] if volume["name"].startswith("kneewatch-")]
    assert added == watched["deployment"]["volumes"]
    assert not any("sizeLimit" in volume.get("emptyDir", {}) for volume in added)


def test_other_workloads_are_left_alone(watched: dict[str, dict[str, Any]]) -> None:
    assert watched["replicaset"] == {"containers": [{"name": "vllm", "image": "vllm/vllm-openai"}]}


def node_daemon(folder: Path, *components: str) -> list[dict[str, Any]]:
    """The objects of the node base with components."""
    objects = rendered(
        folder,
        {
            "resources": [at("node", folder)],
            "components": [at(component, folder) for component in components],
            "images": [{"name": "kneewatch", "newName": "registry.example/kneewatch"}],
            "namespace": "chat",
            "labels": [{"pairs": {"release": "mine"}}],
        },
    )
    for obj in objects:
        check(obj)
        assert obj["metadata"]["namespace"] == "chat"
        assert obj["metadata"]["labels"]["release"] == "mine"
    return objects


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return node_daemon(tmp_path_factory.mktemp("node"))


def test_fleet_and_node_share_a_namespace(tmp_path: Path) -> None:
    components = (*SMALL, "rules", "dashboards", "node-nvml")
    objects = rendered(
        tmp_path,
        {
            "resources": [at("fleet", tmp_path), at("node", tmp_path)],
            "components": [at(component, tmp_path) for component in components],
            "namespace": "chat",
        },
    )
    for obj in objects:
        check(obj)
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in objects]
    assert len(names) == len(set(names))
    pods_selected = [
        obj["spec"]["selector"]["matchLabels"]
        for obj in objects
        if obj["kind"] in ("Deployment", "DaemonSet")
    ]
    (service,) = [obj for obj in objects if obj["kind"] == "Service"]
    assert service["spec"]["selector"] in pods_selected
    assert len({tuple(sorted(labels.items())) for labels in pods_selected}) == 2
    (role,) = [obj for obj in objects if obj["kind"] == "RoleBinding"]
    assert {subject["name"] for subject in role["subjects"]} == {"kneewatch-node"}


def in_force(objects: list[dict[str, Any]]) -> Settings:
    """The settings of the node daemon: its file, and its environment as Kubernetes sets it."""
    data = {obj["metadata"]["name"]: obj["data"] for obj in objects if obj["kind"] == "ConfigMap"}
    environ: dict[str, str] = {}
    for variable in ours(pods(objects)["kneewatch-node"])["env"]:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            environ[variable["name"]] = data[reference["name"]][reference["key"]]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "spec.nodeName"
            environ[variable["name"]] = "gpu-7"
        else:
            environ[variable["name"]] = variable["value"]
    return load(file=SETTINGS["kneewatch-node-settings"], environ=environ, flags={})


def test_a_node_daemon_watches_the_pods_and_gpus_of_its_node(
    node: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = in_force(node)
    assert settings["kubernetes.node"] == "gpu-7"
    assert settings["kubernetes.pods"] == "app.kubernetes.io/name=vllm"
    assert settings["kubernetes.port"] == "8000"
    assert settings["gpu_metrics"].endswith(":9400/metrics")
    driver = node_daemon(tmp_path, "node-nvml")
    assert in_force(driver)["gpu_metrics"] == "nvml"
    assert pods(driver)["kneewatch-node"]["runtimeClassName"] == "nvidia"
    spec = pods(node)["kneewatch-node"]
    assert "runtimeClassName" not in spec
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])
    (state,) = [volume for volume in spec["volumes"] if volume["name"] == "state"]
    assert state["emptyDir"] == {"sizeLimit": "2Gi"}
    assert settings["store.max_bytes"] <= 1024**3, "an evicted pod loses its history"


def test_a_node_daemon_may_list_the_pods_of_its_namespace_and_nothing_else(
    node: list[dict[str, Any]],
) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert only(node, "Role")["rules"] == rules
    binding = only(node, "RoleBinding")
    assert binding["roleRef"]["name"] == only(node, "Role")["metadata"]["name"]
    account = only(node, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": "chat"}
    ]
    spec = pods(node)["kneewatch-node"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (
        account["name"],
        True,
    )
    assert not {"ClusterRole", "ClusterRoleBinding", "Secret"} & {obj["kind"] for obj in node}
    labels = only(node, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert only(node, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels


def test_a_field_that_a_kind_lacks_is_seen(example: list[dict[str, Any]]) -> None:
    for kind, error in (
        ("Deployment", kubernetes_validate.ValidationError),
        ("ServiceMonitor", jsonschema.ValidationError),
    ):
        obj = only(example, kind)
        with pytest.raises(error):
            check({**obj, "spec": {**obj["spec"], "replicaCount": 1}})


def test_the_pods_may_do_little_and_start_a_command_that_exists(
    example: list[dict[str, Any]],
    node: list[dict[str, Any]],
    watched: dict[str, dict[str, Any]],
) -> None:
    node_pod = pods(node)["kneewatch-node"]
    for pod in (pods(example)["kneewatch"], node_pod, watched["deployment"]):
        container = ours(pod)
        limits = {**pod.get("securityContext", {}), **container["securityContext"]}
        assert limits["runAsNonRoot"]
        assert limits["readOnlyRootFilesystem"]
        assert limits["allowPrivilegeEscalation"] is False
        assert limits["capabilities"] == {"drop": ["ALL"]}
        assert limits["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"memory"} == set(container["resources"]["limits"])
        command, *args = container["args"]
        cli.commands[command].make_context(command, args)
        probed = container["livenessProbe"]["httpGet"]["port"]
        assert probed in {port["name"] for port in container["ports"]}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_settings_are_valid_and_refer_to_what_is_mounted(
    name: str,
    example: list[dict[str, Any]],
    node: list[dict[str, Any]],
    watched: dict[str, dict[str, Any]],
) -> None:
    settings = load(file=SETTINGS[name], environ={}, flags={})
    pod = {
        "kneewatch-settings": pods(example).get("kneewatch"),
        "kneewatch-node-settings": pods(node).get("kneewatch-node"),
        "kneewatch-sidecar": watched["deployment"],
    }[name]
    assert pod is not None
    mounts = [mount["mountPath"] for mount in ours(pod)["volumeMounts"]]
    for key in ("http.token_file", "http.admin_token_file"):
        assert any(settings[key].startswith(f"{mount}/") for mount in mounts)
    assert settings["listen"].endswith(f":{ours(pod)['ports'][0]['containerPort']}")


def test_the_image_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tags = {f"kneewatch:{version}"}
    for name in (
        "fleet/deployment.yaml",
        "node/daemon-set.yaml",
        "sidecar/container.yaml",
        "sidecar/leader.yaml",
    ):
        text = (FOLDER / name).read_text()
        assert {word for word in text.split() if word.startswith("kneewatch:")} == tags, name
