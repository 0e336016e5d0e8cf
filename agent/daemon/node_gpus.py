"""The GPUs of this node: finds a source for them and matches them to targets. I/O edge."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.server.process import is_local
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.nvml_calls import Nvml
from kneewatch.collector.gpu.page import DcgmCollector, GpuCollector, GpuPage
from kneewatch.collector.http.address import FetchSettings, parse_target
from kneewatch.collector.names.dcgm_fields import GpuFields, GpuKey, Gpus
from kneewatch.diagnose.gpu import OF_AN_INSTANCE, GpuChoice

HOW_TO_STATE = "set the target's labels gpu_uuids, gpu_indexes, or pod and namespace"
SHOWN_MAX = 8
"""Maximum number of GPUs that are listed by name; of more, only the count is shown."""


class GpuClaim(Struct, frozen=True):
    """What identifies the GPUs of a target: labels and settings, or what its server uses.

    `count` is the number of its GPUs, None if not stated. `alone`: no other target uses the source.
    """

    uuids: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    pod: str = ""
    namespace: str = ""
    node: str = ""
    count: int | None = None
    alone: bool = True

    def choose(self, page: Gpus) -> GpuChoice:
        """Choose the target's GPUs from a page."""
        gpus = _on_node(page, self.node)
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


NO_CLAIM = GpuClaim()


def claim_of(labels: Mapping[str, str], *, count: int | None) -> GpuClaim:
    """The facts that a target's labels state about its GPUs. `count` is the number of its GPUs,
    None if not stated."""
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
    """The GPUs of a node. If all GPUs of the page are on one node, `node` is ignored."""
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
    """All names that a label may use for a GPU or MIG instance: its own names and those of its
    board."""
    names = {key.uuid, board_uuid} if by == "UUID" else {key.index}
    names |= {f"{name}/{key.mig}" for name in names if key.mig}
    return names - {""}


def _names(gpus: Sequence[GpuFields]) -> frozenset[str]:
    """UUIDs and indexes of the GPUs: notes on the page use these names."""
    return frozenset(name for gpu in gpus for name in (gpu.key.uuid, gpu.key.index) if name)


def _board(key: GpuKey) -> tuple[str, str]:
    return key.hostname, key.index or key.uuid


def _with_boards(chosen: Sequence[GpuFields], gpus: Sequence[GpuFields]) -> list[GpuFields]:
    """The chosen GPUs, and the boards of chosen MIG instances: some fields exist only for a whole
    board."""
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


# --- Discovers the GPUs of this node: a DCGM exporter at its usual address, else NVML. I/O edge ---


log = logging.getLogger(__name__)

USUAL_URL = "http://127.0.0.1:9400/metrics"
PROBE_CONNECT_S, PROBE_READ_S = 0.5, 2.0
REDISCOVER_AFTER_FAILURES = 4
"""Number of failures in a row after which the source is discovered again."""


class NodeCollector:
    """The GPU source of this node. It is discovered at the first read and kept while it answers."""

    def __init__(
        self,
        fetch: FetchSettings,
        limits: Limits,
        *,
        load: Callable[[], Nvml],
        url: str = USUAL_URL,
    ) -> None:
        self._fetch, self._limits = fetch.without_secrets(), limits
        self._load, self._url = load, url
        self._collector: GpuCollector | None = None
        self._failing = 0

    @property
    def name(self) -> str:
        """Name of the discovered source."""
        return self._collector.name if self._collector else "gpus"

    def collect(self) -> GpuPage:
        """Read the current state of the node's GPUs.

        Raises:
            CollectError: of kind no_gpu if there is no source, else the source's own error.
        """
        collector = self._collector
        try:
            page = collector.collect() if collector else self._discover()
        except CollectError:
            self._failing += 1
            if self._failing >= REDISCOVER_AFTER_FAILURES:
                self.close()
            raise
        self._failing = 0
        return page

    def close(self) -> None:
        """Close the source. The next `collect` discovers it again."""
        collector, self._collector, self._failing = self._collector, None, 0
        if collector:
            collector.close()

    def _discover(self) -> GpuPage:
        quick = replace(self._fetch, connect_timeout_s=PROBE_CONNECT_S, read_timeout_s=PROBE_READ_S)
        probe = DcgmCollector(self._url, quick, self._limits)
        try:
            page = probe.collect()
        except CollectError as error:
            return self._nvml(error)
        finally:
            probe.close()
        self._collector = DcgmCollector(self._url, self._fetch, self._limits)
        log.info("DCGM exporter found url=%s gpus=%d", self._url, len(page.gpus))
        return page

    def _nvml(self, no_exporter: CollectError) -> GpuPage:
        nvml = NvmlCollector(self._load)
        try:
            page = nvml.collect()
        except CollectError as error:
            if error.kind != "no_gpu":
                self._collector = nvml
                raise
            reason = f"no GPU source: {no_exporter}; {error}"
            raise CollectError(reason, kind="no_gpu", hint="set gpu_metrics") from error
        self._collector = nvml
        log.info("GPUs found through NVML gpus=%d", len(page.gpus))
        return page


def on_this_node(spec: TargetSpec) -> bool:
    """Whether a target's server runs on this node, judged by its address and its label `node`."""
    if spec.played:
        return False
    stated = spec.labels.get("node", "").strip().lower()
    return stated == socket.gethostname().lower() or is_local(parse_target(spec.address).host)
