"""The workloads that Kubernetes pods belong to, by the pods' names. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from kneewatch.diagnose.fleet.inventory import Labels

_SAFE = "[bcdfghjklmnpqrstvwxz2456789]"
"""The letters of generated names (k8s.io/apimachinery/pkg/util/rand)."""

_OF_DEPLOYMENT = re.compile(rf"(.+)-{_SAFE}{{6,10}}-{_SAFE}{{5}}")
_NUMBERED = re.compile(r"(.+)-\d+")


def workloads_of(pod: str) -> set[str]:
    """The names that the Deployment, StatefulSet or LeaderWorkerSet of a pod may have.

    chat-7d9f8c6b54-x2x4z is of the Deployment chat, chat-0 of the StatefulSet or LeaderWorkerSet
    chat, chat-0-1 of the LeaderWorkerSet chat. Empty for a name of no such form.
    """
    names: set[str] = set()
    if match := _OF_DEPLOYMENT.fullmatch(pod):
        names.add(match[1])
    if match := _NUMBERED.fullmatch(pod):
        names.add(match[1])
        if leader := _NUMBERED.fullmatch(match[1]):
            names.add(leader[1])
    return names


class Objects:
    """Kubernetes objects, from the labels of kube-state-metrics' series and the object's name."""

    def __init__(self, named: Iterable[tuple[Labels, str]]) -> None:
        self._clusters: dict[tuple[str, str], set[str]] = {}
        for labels, name in named:
            place = namespace_of(labels), name
            self._clusters.setdefault(place, set()).add(labels.get("cluster", ""))

    def has(self, labels: Labels, name: str) -> bool:
        """Whether an object of this name is in the namespace of a series, and in its cluster where
        both have a cluster label."""
        clusters = self._clusters.get((namespace_of(labels), name), set())
        own = labels.get("cluster", "")
        return bool(clusters) and (not own or bool(clusters & {own, ""}))


def namespace_of(labels: Labels) -> str:
    """The namespace of a series' object: without honorLabels the label is exported_namespace."""
    return labels.get("exported_namespace") or labels.get("namespace", "")


def pod_of(labels: Labels) -> str:
    """The name of a series' pod. Without honorLabels the workload's label is exported_pod."""
    return labels.get("exported_pod") or labels.get("pod", "")


def is_worker(pod: str, replicas: Collection[str]) -> bool:
    """Whether a pod is a worker of a replica's LeaderWorkerSet (chat-0-1 of chat-0): a worker has
    no vLLM page of its own."""
    match = _NUMBERED.fullmatch(pod)
    return match is not None and match[1] in replicas
