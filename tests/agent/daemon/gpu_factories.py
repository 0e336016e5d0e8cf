"""GPU sources with real exporters on 127.0.0.1, and pynvml without a driver."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.targets import TargetSpec, spec
from kneewatch.collector.gpu.nvml_calls import load_nvml
from tests.agent.daemon.factories import settings
from tests.collector.servers import Server, Start, answer
from tests.waiting import PATIENCE_S

T_S = 1_800_000_000.0
NOWHERE = "http://127.0.0.1:9/metrics"
"""Nothing listens there."""


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Exporter:
    """An exporter whose page a test changes."""

    def __init__(self, start: Start, text: str) -> None:
        self.text, self.status = text, "200 OK"
        self.server: Server = start(self._serve)

    def _serve(self, sock: socket.socket, _request: bytes, _number: int) -> bool:
        sock.sendall(answer(self.text.encode(), status=self.status))
        return True

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def asked(self) -> int:
        return len(self.server.requests)


LABELS = ("gpu_uuids", "gpu_indexes", "pod", "namespace", "node")
ELSEWHERE = "http://10.255.0.1:8000"


def target(
    name: str = "a",
    *,
    at: str = ELSEWHERE,
    page: str | None = None,
    **more: Any,  # noqa: ANN401 - labels, and settings with __ for the dot
) -> TargetSpec:
    """A target, not on this node unless `at` says so."""
    stated = {key: str(more.pop(key)) for key in LABELS if key in more}
    target_settings = settings(**more, gpu_metrics=page)
    return spec(at, target_settings, "test", name=name, labels=stated)


HERE = "http://127.0.0.1:8000"


def wait(held: threading.Event) -> None:
    """As long as a driver hangs."""
    held.wait(2 * PATIENCE_S)


def no_library() -> ModuleType:
    """A pynvml on a machine without a driver."""
    module = load_nvml()
    library = ModuleType("pynvml")
    library.__dict__.update(module.__dict__)

    def without(*_: object) -> None:
        raise module.NVMLError(module.NVML_ERROR_LIBRARY_NOT_FOUND)

    library.__dict__["nvmlInit"] = without
    return library


class Make:
    """Makes sources that look for an exporter where nothing listens, unless told otherwise."""

    def __init__(self) -> None:
        self._made: list[GpuSources] = []

    def __call__(
        self,
        *specs: TargetSpec,
        load: Callable[[], ModuleType] = no_library,
        usual_url: str = NOWHERE,
        monotonic: Callable[[], float] = time.monotonic,
        hang_s: float = PATIENCE_S,
    ) -> GpuSources:
        sources = GpuSources(
            specs,
            settings(),
            load=load,
            usual_url=usual_url,
            monotonic=monotonic,
            hang_s=hang_s,
        )
        self._made.append(sources)
        return sources

    def close(self) -> None:
        for sources in self._made:
            sources.close(1.0)


def active(sources: GpuSources, target_spec: TargetSpec, t_s: float = T_S) -> float | None:
    return sources.reading(target_spec, t_s).values.get("gpu_engine_active_ratio")


def said(sources: GpuSources, target_spec: TargetSpec, t_s: float = T_S) -> list[str]:
    """What is said of all the target's GPU signals together."""
    return [line for line in sources.reading(target_spec, t_s).unknown if line.startswith("gpu_*")]


def errors(sources: GpuSources, target_spec: TargetSpec) -> list[str]:
    return [state.error for state in sources.states(target_spec)]
