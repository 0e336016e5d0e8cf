"""The GPU sources beside the targets: which there are, whose GPUs they show, how they do. I/O edge.

A target's source is the page that `gpu_metrics` names, NVML where that says `nvml`, none where it
says `none`; unset, it is what is found on this node (gpu_node.py) if the target is here. Targets
with the same source share it: it is read once an interval. Which of its GPUs are a target's is
worked out in gpu_joins.py.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from threading import Event, Lock

from kneewatch.agent.board import SourceState
from kneewatch.agent.daemon.gpu_joins import Claim, claim_of
from kneewatch.agent.daemon.gpu_node import USUAL_URL, NodeCollector, on_this_node
from kneewatch.agent.daemon.gpu_source import HANG_S, GpuSource
from kneewatch.agent.daemon.pool import DaemonPool
from kneewatch.agent.deployment import stated
from kneewatch.agent.settings import Settings
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.base import SettingsError
from kneewatch.collector.dcgm import DcgmCollector
from kneewatch.collector.gpu_pages import GpuCollector
from kneewatch.collector.http.access import FetchSettings
from kneewatch.collector.http.address import metrics_url, parse_target
from kneewatch.collector.nvml import NvmlCollector
from kneewatch.collector.nvml_calls import Nvml, load_nvml
from kneewatch.diagnose.gpus import NO_GPUS, GpuMonitor, GpuReading
from kneewatch.diagnose.recommend.launch import Launch

NVML, NONE = "nvml", "none"
"""Words in place of an address in `gpu_metrics`."""

CONNECT_S, READ_S = 3.0, 6.0
"""The longest a page is waited for: less than what counts as hanging."""

CLOSING_S = 1.0
TURN_S = 0.2
ELSEWHERE = GpuReading(
    {}, ("gpu_*: no GPU source (the target is not on this node; gpu_metrics names its page)",)
)

Key = tuple[str, ...]
"""What makes two sources the same: their kind, address and access."""

NODE: Key = ("node",)


@dataclass(frozen=True, slots=True)
class Watched:
    """A target, its source, what it claims and the monitor that reads it."""

    target: str
    key: Key
    claim: Claim
    window_s: float
    monitor: GpuMonitor

    def same(self, other: Watched) -> bool:
        """Whether what was seen for one is good for the other."""
        return (self.key, self.claim, self.window_s) == (other.key, other.claim, other.window_s)


class GpuSources:
    """All GPU sources of the daemon. `collect` is called at the GPUs' interval; everything else may
    be called in any thread and never waits for a source."""

    def __init__(
        self,
        specs: Sequence[TargetSpec],
        settings: Settings,
        *,
        load: Callable[[], Nvml] = load_nvml,
        usual_url: str = USUAL_URL,
        hang_s: float = HANG_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._load, self._usual_url = settings, load, usual_url
        self._hang_s, self._monotonic = hang_s, monotonic
        self._pool, self._lock, self._closed = DaemonPool(), Lock(), Event()
        self._sources: dict[Key, GpuSource] = {}
        self._watched: dict[str, Watched] = {}
        self._without: dict[str, GpuReading] = {}
        self.update(specs)

    def update(self, specs: Sequence[TargetSpec]) -> None:
        """Watch these targets from now on; what did not change goes on as it was."""
        keys = {spec.name: self._key(spec) for spec in specs}
        sharing = Counter(keys.values())
        # Most targets share their settings, and a count can take reading a file.
        stated_by = {id(spec.settings): spec.settings for spec in specs}
        counts = {key: gpu_count(settings) for key, settings in stated_by.items()}
        with self._lock:
            for name, old in self._watched.items():
                if keys.get(name) != old.key:
                    self._sources[old.key].unsubscribe(name)
            made = [
                self._watch(spec, key, counts[id(spec.settings)], alone=sharing[key] == 1)
                for spec in specs
                if (key := keys[spec.name]) is not None
            ]
            self._watched = {watched.target: watched for watched in made}
            self._without = {
                spec.name: NO_GPUS if spec.played or spec.gpu_metrics else ELSEWHERE
                for spec in specs
                if keys[spec.name] is None
            }
            for key in self._sources.keys() - set(keys.values()):
                self._sources.pop(key).retire(self._pool)

    def collect(self, now_s: float) -> None:
        """Read every source that is due; returns once all have answered or hang."""
        with self._lock:
            sources = list(self._sources.values())
        runs = [run for source in sources if (run := source.start(self._pool, now_s))]
        until_s = time.monotonic() + self._hang_s
        for run in runs:
            while not run.done.is_set() and not self._closed.is_set():
                left_s = until_s - time.monotonic()
                if left_s <= 0 or run.done.wait(min(left_s, TURN_S)):
                    break
        for source in sources:
            source.give_up(now_s)

    def reading(self, spec: TargetSpec, t_s: float) -> GpuReading:
        """What the target's GPUs say, as far as it is known which are the target's."""
        watched = self._watched.get(spec.name)
        if watched is None:
            return self._without.get(spec.name, NO_GPUS)
        return watched.monitor.reading(t_s)

    def states(self, spec: TargetSpec | None = None) -> list[SourceState]:
        """How a target's source does, and how its GPUs were joined to it; without a target, how
        all sources do. Where there is no GPU there is no state: that is not a failure."""
        if spec is None:
            with self._lock:
                sources = list(self._sources.values())
            return [source.state for source in sources if source.state is not None]
        watched = self._watched.get(spec.name)
        source = self._sources.get(watched.key) if watched else None
        if watched is None or source is None or (state := source.state) is None:
            return []
        return [replace(state, joined=watched.monitor.reading(state.t_s).joined)]

    def close(self) -> None:
        """End all sources; one that hangs is left to itself."""
        self._closed.set()
        with self._lock:
            sources, self._sources, self._watched = list(self._sources.values()), {}, {}
        for source in sources:
            source.retire(self._pool)
        until_s = time.monotonic() + CLOSING_S
        while self._pool.busy and time.monotonic() < until_s:
            time.sleep(0.01)

    def _watch(self, spec: TargetSpec, key: Key, count: int | None, *, alone: bool) -> Watched:
        claim = claim_of(spec.labels, count=count)
        unstated = not (claim.uuids or claim.indexes or claim.pod)
        # What others do only matters where GPUs are joined by their number.
        claim = replace(claim, alone=unstated and alone)
        window_s, interval_s = spec.settings["window_s"], spec.settings["gpu_interval_s"]
        monitor = GpuMonitor(window_s=window_s, interval_s=interval_s, choose=claim.choose)
        watched = Watched(spec.name, key, claim, window_s, monitor)
        old = self._watched.get(spec.name)
        if old is not None and old.same(watched):
            return old
        if key not in self._sources:
            self._sources[key] = GpuSource(
                self._collector(spec, key),
                interval_s=interval_s,
                hang_s=self._hang_s,
                optional=key == NODE,
                monotonic=self._monotonic,
            )
        self._sources[key].subscribe(spec.name, monitor)
        return watched

    def _key(self, spec: TargetSpec) -> Key | None:
        asked = (spec.gpu_metrics or "").strip()
        if asked == NONE or spec.played:
            return None
        if asked == NVML:
            return (NVML,)
        if asked:
            access = json.dumps(asdict(_access(spec, asked)), sort_keys=True)
            return ("page", metrics_url(asked), access)
        return NODE if on_this_node(spec) else None

    def _collector(self, spec: TargetSpec, key: Key) -> GpuCollector:
        limits = spec.settings.limits()
        if key[0] == NVML:
            return NvmlCollector(self._load, monotonic=self._monotonic)
        if key == NODE:
            fetch = _short(self._settings.fetch())
            return NodeCollector(fetch, limits, load=self._load, url=self._usual_url)
        return DcgmCollector(key[1], _access(spec, key[1]), limits)


def _access(spec: TargetSpec, url: str) -> FetchSettings:
    """How a target's GPU page is read: another server is not shown what is for the target."""
    fetch = _short(spec.settings.fetch())
    same = parse_target(url).origin == parse_target(spec.address).origin
    return fetch if same else fetch.without_secrets()


def _short(fetch: FetchSettings) -> FetchSettings:
    return replace(
        fetch,
        connect_timeout_s=min(fetch.connect_timeout_s, CONNECT_S),
        read_timeout_s=min(fetch.read_timeout_s, READ_S),
    )


def gpu_count(settings: Settings) -> int | None:
    """GPUs of a server, where that is stated: those of an engine by as many engines as it runs."""
    try:
        known = stated(settings)
    except SettingsError:  # whoever starts the target says so
        return None
    launch = known.launch or Launch()
    tensor = known.tensor_parallel or launch.count("--tensor-parallel-size")
    engine = known.gpus
    if engine is None and tensor is not None:
        engine = tensor * (launch.count("--pipeline-parallel-size") or 1)
    return None if engine is None else engine * (launch.count("--data-parallel-size") or 1)
