"""Targets from the Kubernetes API: the pods of vLLM, of one node or of a namespace. I/O edge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kneewatch.agent.kubernetes import Cluster, Pod, Pods, own_namespace
from kneewatch.agent.server.pod import pod_reading
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.targets import TargetSpec, spec
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.deployment.server_facts import SourceReading

log = logging.getLogger(__name__)

PODS_JOB, PODS_EVERY_S = "pods", 10.0
FORBIDDEN = "; a Role must allow its service account `list` on `pods` there"


@dataclass(frozen=True, slots=True)
class Server:
    """A pod that serves: its name, its labels as a target, the URL of its port, and the facts of
    its spec, undated: a pod is the same server while they are equal."""

    name: str
    labels: Mapping[str, str]
    url: str
    reading: SourceReading


class PodTargets:
    """The pods under watch, read anew by a job of the scheduler.

    While the API cannot be read, the pods of the last reading stay targets.

    Raises:
        SettingsError: the API's client is missing, or this is no pod with access to it.
    """

    def __init__(self, settings: Settings, connect: Callable[[], Pods] = Cluster) -> None:
        self._selector: str = settings["kubernetes.pods"]
        self._namespaces: tuple[str, ...] = settings["kubernetes.namespaces"] or (own_namespace(),)
        self._node: str | None = settings["kubernetes.node"]
        self._port: str = settings["kubernetes.port"]
        self._api = connect()
        self._servers: dict[str, tuple[Server, ...]] = {}
        self._errors: dict[str, str] = {}
        self._without_port: frozenset[str] = frozenset()

    def cycle(self) -> float | None:
        """Read the pods of all namespaces once."""
        for namespace in self._namespaces:
            self._read(namespace)
        return None

    def crashed(self, error: Exception) -> float | None:
        """Keep the pods of the last reading."""
        del error
        return None

    def servers(self) -> tuple[Server, ...]:
        """The pods that serve, by namespace. Thread-safe."""
        by_namespace = dict(self._servers)
        return tuple(server for name in self._namespaces for server in by_namespace.get(name, ()))

    def _read(self, namespace: str) -> None:
        try:
            pods = self._api.pods(namespace, selector=self._selector, node=self._node)
        except CollectError as error:
            if self._errors.get(namespace) != str(error):
                self._errors[namespace] = str(error)
                log.error(  # noqa: TRY400 - no bug
                    "pods: cannot be listed, keeping the previous targets namespace=%s error=%s%s",
                    namespace,
                    error,
                    FORBIDDEN if error.kind == "auth" else "",
                )
            return
        if self._errors.pop(namespace, ""):
            log.info("pods: can be listed again namespace=%s", namespace)
        self._servers[namespace] = tuple(self._serving(namespace, pods))

    def _serving(self, namespace: str, pods: Iterable[Pod]) -> Iterator[Server]:
        for pod in pods:
            if not is_serving(pod):
                continue
            name = f"{namespace}/{pod['metadata']['name']}"
            port = port_number(pod, self._port)
            if port is None:
                if name not in self._without_port:
                    self._without_port |= {name}
                    log.warning("pods: no container has the port pod=%s port=%s", name, self._port)
                continue
            address = str(pod["status"]["podIP"])
            host = f"[{address}]" if ":" in address else address
            labels = {"namespace": namespace, "pod": str(pod["metadata"]["name"])}
            if node := pod["spec"].get("nodeName"):
                labels["node"] = str(node)
            yield Server(name, labels, f"http://{host}:{port}", pod_reading(pod, port, 0.0))


def pod_specs(servers: Iterable[Server], settings: Settings) -> list[TargetSpec]:
    """The targets of these pods: the name is NAMESPACE/POD, so that a new address of a pod of the
    same name continues its history.

    Raises:
        SettingsError: an address is no URL.
    """
    return [
        replace(
            spec(
                server.url,
                settings,
                f"kubernetes {server.name}",
                name=server.name,
                labels=server.labels,
            ),
            pod=server.reading,
        )
        for server in servers
    ]


def is_serving(pod: Pod) -> bool:
    """Whether a pod serves, or served and does not any more: it is ready, was ready, or one of its
    containers was restarted and is not ready.

    A pod that starts for the first time answers nothing for minutes, and one that is being deleted
    stops on purpose: neither is an outage.
    """
    status: Mapping[str, Any] = pod.get("status") or {}
    ending = pod["metadata"].get("deletionTimestamp") is not None
    if ending or status.get("phase") != "Running" or not status.get("podIP"):
        return False
    conditions = {condition["type"]: condition for condition in _rows(status, "conditions")}
    ready = conditions.get("Ready", {})
    if ready.get("status") == "True":
        return True
    # A pod is unready from its first moment; a later change means that it was ready between.
    started = str(conditions.get("Initialized", {}).get("lastTransitionTime") or "")
    was_ready = bool(started) and str(ready.get("lastTransitionTime") or "") > started
    return was_ready or any(
        container.get("restartCount") and not container.get("ready")
        for container in _rows(status, "containerStatuses")
    )


def port_number(pod: Pod, port: str) -> int | None:
    """The number of a port that is given by number or by the name in a container; None for a name
    that no container has."""
    if port.isdigit():
        return int(port)
    for container in _rows(pod["spec"], "containers"):
        for entry in _rows(container, "ports"):
            if entry.get("name") == port:
                return int(entry["containerPort"])
    return None


def _rows(table: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """The tables of a list, which the API leaves out or sets to null where it is empty."""
    return table.get(key) or ()
