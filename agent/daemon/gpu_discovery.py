"""The GPUs of this node, found by looking: a DCGM exporter where it usually is, else NVML.

I/O edge.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.collector.gpu.dcgm_exporter import DcgmCollector
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.nvml_calls import Nvml
from kneewatch.collector.gpu.page import GpuCollector, GpuPage
from kneewatch.collector.http.address import parse_target
from kneewatch.collector.http.connection import FetchSettings

log = logging.getLogger(__name__)

USUAL_URL = "http://127.0.0.1:9400/metrics"
PROBE_CONNECT_S, PROBE_READ_S = 0.5, 2.0
LOOK_ANEW_FAILURES = 4
"""After so many failures in a row what was found is looked for anew."""


class NodeCollector:
    """What there is on this node, looked for once and then kept while it answers."""

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
        self._found: GpuCollector | None = None
        self._failing = 0

    @property
    def name(self) -> str:
        """What was found, in a word."""
        return self._found.name if self._found else "gpus"

    def collect(self) -> GpuPage:
        """The GPUs of the node as they are now.

        Raises:
            CollectError: of kind no_gpu where there is nothing to read, else as it was found.
        """
        found = self._found
        try:
            taken = found.collect() if found else self._look()
        except CollectError:
            self._failing += 1
            if self._failing >= LOOK_ANEW_FAILURES:
                self.close()
            raise
        self._failing = 0
        return taken

    def close(self) -> None:
        """Give back what is held; the next `collect` looks anew."""
        found, self._found, self._failing = self._found, None, 0
        if found:
            found.close()

    def _look(self) -> GpuPage:
        quick = replace(self._fetch, connect_timeout_s=PROBE_CONNECT_S, read_timeout_s=PROBE_READ_S)
        probe = DcgmCollector(self._url, quick, self._limits)
        try:
            taken = probe.collect()
        except CollectError as error:
            return self._nvml(error)
        finally:
            probe.close()
        self._found = DcgmCollector(self._url, self._fetch, self._limits)
        log.info(
            "found a DCGM exporter on this node url=%s gpus=%d", self._url, len(taken.gpus.gpus)
        )
        return taken

    def _nvml(self, no_exporter: CollectError) -> GpuPage:
        nvml = NvmlCollector(self._load)
        try:
            taken = nvml.collect()
        except CollectError as error:
            if error.kind != "no_gpu":
                self._found = nvml
                raise
            why = f"no GPU source: {no_exporter}; {error}"
            raise CollectError(why, kind="no_gpu", hint="set gpu_metrics") from error
        self._found = nvml
        log.info("found GPUs on this node through NVML gpus=%d", len(taken.gpus.gpus))
        return taken


def on_this_node(spec: TargetSpec) -> bool:
    """Whether a target's server runs where we do, as far as its address or its label node says so.

    Names are not resolved: that could hang, and what a name means can change.
    """
    if spec.played:
        return False
    own = socket.gethostname().lower()
    if spec.labels.get("node", "").strip().lower() == own:
        return True
    host = parse_target(spec.address).host.lower()
    if host == "localhost" or host.endswith(".localhost") or host == own:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or _is_own(address)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    # Only an address of this machine can be bound to; nothing is sent.
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
