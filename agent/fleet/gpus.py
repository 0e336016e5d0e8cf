"""Which GPUs are a replica's: DCGM's series joined by pod, else by node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kneewatch.agent.fleet.queries import COUNTED, GPUS
from kneewatch.collector.prometheus.answers import Sample
from kneewatch.diagnose.fleet.shape import Key, Labels, Member, Shape

MODEL = ("modelName", "model_name")
NODE = ("Hostname", "hostname", "node")
Place = tuple[str, ...]


def joined(
    shape: Shape, answers: Mapping[str, Sequence[Sample]]
) -> tuple[Shape, dict[Key, dict[str, float]]]:
    """The shape with the GPU's model as tier where no label names one, and figures by engine.

    `gpus` is among the figures where DCGM says which pod has them: of a node they may be others'.
    """
    by_place: dict[Place, dict[str, float]] = {}
    models: dict[Place, set[str]] = {}
    for key, samples in answers.items():
        fold = min if GPUS.get(key, ("max",))[0] == "min" else max
        for sample in samples:
            for place in places(sample.labels):
                if key == COUNTED and place[0] != "pod":
                    continue
                figures = by_place.setdefault(place, {})
                figures[key] = fold(figures.get(key, sample.value), sample.value)
                if model := next((sample.labels[n] for n in MODEL if sample.labels.get(n)), ""):
                    models.setdefault(place, set()).add(model)
    members: list[Member] = []
    found: dict[Key, dict[str, float]] = {}
    for member in shape.members:
        at = next((one for one in places_of(member) if one in by_place), None)
        if at is None:
            members.append(member)
            continue
        found[member.key] = by_place[at]
        kinds = models.get(at, set())
        tier = member.tier or (next(iter(kinds)) if len(kinds) == 1 else "")
        members.append(replace(member, tier=tier))
    return replace(shape, members=tuple(members)), found


def places(labels: Labels) -> Iterable[Place]:
    """Where a GPU is. Without honorLabels the workload's own labels are the exported ones."""
    pod = labels.get("exported_pod") or labels.get("pod", "")
    namespace = labels.get("exported_namespace") or labels.get("namespace", "")
    cluster = labels.get("cluster", "")
    if pod and (labels.get("exported_pod") or "dcgm" not in pod):
        yield "pod", cluster, namespace, pod
    for node in dict.fromkeys(labels[name] for name in NODE if labels.get(name)):
        yield "node", cluster, node


def places_of(member: Member) -> Iterable[Place]:
    """Where the GPUs of an engine may be, the best known first: in its cluster, whose pods and
    nodes others may have by the same names, or where DCGM's series name none."""
    labels = member.labels
    clusters = dict.fromkeys((labels.get("cluster", ""), ""))
    if labels.get("pod"):
        for cluster in clusters:
            yield "pod", cluster, labels.get("namespace", ""), labels["pod"]
    for node in (member.node, labels.get("instance", "").rpartition(":")[0]):
        for cluster in clusters if node else ():
            yield "node", cluster, node
