"""Maps the GPUs of a page to a target, by its labels or else by their count. Pure.

| label of the target | means |
| --- | --- |
| `gpu_uuids` | its GPUs by UUID, with commas between; a MIG instance by its own, or as GPU-.../3 |
| `gpu_indexes` | its GPUs as the driver numbers them, such as 0,1; a MIG instance as 0/3 |
| `pod`, `namespace` | its pod, where the exporter says which pod has a GPU |
| `node` | its node, where a page shows several |

A stated GPU that is missing is reported, never replaced by a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.collector.names.dcgm_fields import GpuBinding, GpuFields, GpuKey
from kneewatch.diagnose.gpu import OF_AN_INSTANCE, GpuChoice

HOW_TO_STATE = "set the target's labels gpu_uuids, gpu_indexes, or pod and namespace"
SHOWN_MAX = 8
"""Up to this many GPUs are listed by name; more are counted."""


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """What a target's labels and settings state about its GPUs.

    `count` is its number of GPUs, if stated; `alone`: no other target uses the source.
    """

    uuids: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    pod: str = ""
    namespace: str = ""
    node: str = ""
    count: int | None = None
    alone: bool = True

    def choose(self, binding: GpuBinding) -> GpuChoice:
        """The target's GPUs on a page."""
        gpus = _on_node(binding.gpus, self.node)
        has_pods = any(gpu.workloads for gpu in gpus)
        if not gpus:
            return GpuChoice((), "", missing=(f"node {self.node} has no GPU on the page",))
        if self.uuids:
            return _named(gpus, self.uuids, by="UUID")
        if self.pod and has_pods and (chosen := self._of_pod(gpus)) is not None:
            return chosen
        if self.indexes:
            return _named(gpus, self.indexes, by="index")
        if self.pod and has_pods:
            pod = f"{self.namespace}/{self.pod}" if self.namespace else self.pod
            return GpuChoice((), "", missing=(f"no GPU on the page is assigned to pod {pod}",))
        return self._by_number(gpus)

    def _of_pod(self, gpus: Sequence[GpuFields]) -> GpuChoice | None:
        chosen = [gpu for gpu in gpus if self._namespaces(gpu)]
        if not chosen:
            return None
        namespaces = sorted({space for gpu in chosen for space in self._namespaces(gpu)})
        joined = f"by pod: {_shown(chosen)}"
        if len(namespaces) == 1:
            return GpuChoice(_with_boards(chosen, gpus), joined, names=_names(chosen))
        why = (
            f"pod {self.pod} exists in namespaces {', '.join(namespaces)}, so its GPUs are a "
            "guess: set the target's label namespace"
        )
        return GpuChoice(chosen, f"{joined}: a guess", guess=True, missing=(why,))

    def _namespaces(self, gpu: GpuFields) -> set[str]:
        """Namespaces in which the target's pod uses this GPU."""
        return {
            work.namespace
            for work in gpu.workloads
            if work.pod == self.pod and self.namespace in ("", work.namespace)
        }

    def _by_number(self, gpus: Sequence[GpuFields]) -> GpuChoice:
        boards = {_board(gpu.key) for gpu in gpus}
        if len(gpus) == 1:
            return GpuChoice(gpus, "the only GPU on the page")
        if self.alone and self.count == len(boards) == len(gpus):
            return GpuChoice(
                gpus, f"likely all {len(gpus)} GPUs on the page: the target has as many"
            )
        why = f"all {len(gpus)} GPUs on the page taken as the target's, a guess: {HOW_TO_STATE}"
        return GpuChoice(
            gpus, f"all {len(gpus)} GPUs on the page: a guess", guess=True, missing=(why,)
        )


@dataclass(frozen=True, slots=True)
class UsedGpus:
    """The GPUs that a server was observed to use: their UUIDs, else its pod as NAMESPACE/NAME."""

    uuids: tuple[str, ...] = ()
    pod: str = ""


NOTHING_USED = UsedGpus()


def claim_of(labels: Mapping[str, str], *, count: int | None) -> GpuClaim:
    """The claim that a target's labels state."""
    return GpuClaim(
        uuids=_listed(labels.get("gpu_uuids", "")),
        indexes=_listed(labels.get("gpu_indexes", "")),
        pod=labels.get("pod", "").strip(),
        namespace=labels.get("namespace", "").strip(),
        node=labels.get("node", "").strip(),
        count=count,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def _on_node(gpus: Sequence[GpuFields], node: str) -> Sequence[GpuFields]:
    """The GPUs of a node. If the page has only one node, its name does not matter."""
    if not node or len({gpu.key.hostname for gpu in gpus}) < 2:
        return gpus
    return [gpu for gpu in gpus if _host(gpu.key.hostname) == _host(node)]


def _host(name: str) -> str:
    return name.partition(".")[0].lower()


def _named(gpus: Sequence[GpuFields], stated: Sequence[str], *, by: str) -> GpuChoice:
    uuids = {_board(gpu.key): gpu.key.uuid for gpu in gpus if not gpu.key.mig}
    aliases = [(gpu, _aliases(gpu.key, by, uuids.get(_board(gpu.key), ""))) for gpu in gpus]
    chosen = [gpu for gpu, names in aliases if not names.isdisjoint(stated)]
    present = {name for _, names in aliases for name in names}
    missing_names = [name for name in stated if name not in present]
    missing = (
        [f"GPU {', '.join(missing_names)} is not on the page, and its {by} was stated"]
        if missing_names
        else []
    )
    names = _names(chosen) | set(stated)
    if not chosen:
        return GpuChoice((), "", names=names, missing=missing)
    joined = f"by {by}: {_shown(chosen)}"
    nodes = {gpu.key.hostname for gpu in chosen}
    if by == "index" and len(nodes) > 1:
        missing.append(
            f"{len(nodes)} nodes have GPUs of that index, so this is a guess: set the label node"
        )
        return GpuChoice(chosen, f"{joined}: a guess", guess=True, names=names, missing=missing)
    return GpuChoice(_with_boards(chosen, gpus), joined, names=names, missing=missing)


def _aliases(key: GpuKey, by: str, board_uuid: str) -> set[str]:
    """All names of a GPU or MIG instance: its own, and those of its board."""
    names = {key.uuid, board_uuid} if by == "UUID" else {key.index}
    names |= {f"{name}/{key.mig}" for name in names if key.mig}
    return names - {""}


def _names(gpus: Sequence[GpuFields]) -> frozenset[str]:
    """UUIDs and indexes of the GPUs, to match notes on the page."""
    return frozenset(name for gpu in gpus for name in (gpu.key.uuid, gpu.key.index) if name)


def _board(key: GpuKey) -> tuple[str, str]:
    return key.hostname, key.index or key.uuid


def _with_boards(chosen: Sequence[GpuFields], gpus: Sequence[GpuFields]) -> list[GpuFields]:
    """The GPUs, plus the boards of MIG instances, for fields that only a board has."""
    with_boards = list(chosen)
    for gpu in gpus:
        parts = [part for part in chosen if part.key.mig and _board(part.key) == _board(gpu.key)]
        if gpu.key.mig or gpu in chosen or not parts:
            continue
        shown_by_parts = {name for part in parts for name in part.fields}
        own = {
            name: slots
            for name, slots in gpu.fields.items()
            if name not in shown_by_parts and not name.startswith(OF_AN_INSTANCE)
        }
        with_boards.append(replace(gpu, fields=own))
    return with_boards


def _shown(gpus: Sequence[GpuFields]) -> str:
    if len(gpus) > SHOWN_MAX:
        return f"{len(gpus)} GPUs"
    keys = [gpu.key for gpu in gpus]
    names = [f"{key.index or key.uuid}/{key.mig}".removesuffix("/") for key in keys]
    return f"GPU {', '.join(names)}"
