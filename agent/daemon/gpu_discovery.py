"""Discovers the GPUs of this node: a DCGM exporter at its usual address, else NVML. I/O edge."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.nvml_calls import Nvml
from kneewatch.collector.gpu.page import DcgmCollector, GpuCollector, GpuPage
from kneewatch.collector.http.address import parse_target
from kneewatch.collector.http.connection import FetchSettings

log = logging.getLogger(__name__)

USUAL_URL = "http://127.0.0.1:9400/metrics"
PROBE_CONNECT_S, PROBE_READ_S = 0.5, 2.0
REDISCOVER_AFTER_FAILURES = 4
"""Failures in a row after which discovery is repeated."""


class NodeCollector:
    """The GPU source of this node, discovered once and kept while it answers."""

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
        """The GPUs of the node as they are now.

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
        """Close the source; the next `collect` discovers again."""
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
        log.info("DCGM exporter found url=%s gpus=%d", self._url, len(page.gpus.gpus))
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
        log.info("GPUs found through NVML gpus=%d", len(page.gpus.gpus))
        return page


def on_this_node(spec: TargetSpec) -> bool:
    """Whether a target's server runs on this node, by its address or its label `node`.

    Host names are not resolved: that could hang, and the result can change.
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
