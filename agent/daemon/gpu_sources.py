"""GPU sources: reading, backoff, and the targets that use them. I/O edge."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kneewatch.agent.daemon.node_gpus import (
    NO_CLAIM,
    USUAL_URL,
    GpuClaim,
    NodeCollector,
    claim_of,
    on_this_node,
)
from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, Job
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.nvml_calls import Nvml, load_nvml
from kneewatch.collector.gpu.page import GPUS_LOST, DcgmCollector, GpuCollector, GpuPage
from kneewatch.collector.http.address import FetchSettings, metrics_url, parse_target
from kneewatch.diagnose.gpu import GpuMonitor
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.reports.health import SourceState
from kneewatch.rules.formatting import span

log = logging.getLogger(__name__)

HANG_S = 10.0
"""Seconds after which a reading counts as hanging."""

BACKOFF_MOST_S = 300.0
REDISCOVERY_S = 600.0
"""Seconds until a node without a GPU is searched for GPUs again."""

NO_GPU = "no_gpu"
EARLY_S = 1.0
"""Seconds by which a reading may start early: the times of jobs vary a little."""


class Reading(Struct):
    """A running read of a source."""

    t_s: float
    started_s: float
    done: Event = field(default_factory=Event)
    given_up: bool = False


def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, so that a driver that hangs delays neither other work nor the
    exit.

    Raises:
        RuntimeError: no more threads can be started.
    """
    Thread(target=work, name="kneewatch-gpus", daemon=True).start()


class GpuSource:
    """A GPU collector that is read by one thread at a time, and the monitors that receive its
    pages.

    `optional`: a missing GPU is not an error.
    """

    def __init__(
        self,
        collector: GpuCollector,
        *,
        interval_s: float,
        hang_s: float = HANG_S,
        optional: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collector, self._interval_s, self._hang_s = collector, interval_s, hang_s
        self._optional, self._monotonic = optional, monotonic
        self._lock = Lock()
        self._monitors: dict[str, GpuMonitor] = {}
        self._run: Reading | None = None
        self._last: tuple[float, GpuPage] | CollectError | None = None
        self._failing, self._due_s = 0, float("-inf")
        self._retired, self._closed = False, Event()
        self._logged: set[str] = set()
        self.state: SourceState | None = None
        """State after the newest reading. None before the first reading, and where there is
        no GPU."""

    def subscribe(self, target: str, monitor: GpuMonitor) -> None:
        """Send the newest page and all later ones to the monitor of a target. Several targets may
        share a monitor."""
        with self._lock:
            shared = monitor in self._monitors.values()
            self._monitors[target] = monitor
            if shared:
                return
            if isinstance(self._last, CollectError):
                monitor.failed(str(self._last), lost=self._last.kind == GPUS_LOST)
            elif self._last is not None:
                monitor.take(*self._last)
            else:
                monitor.failed("GPUs not read yet")

    def unsubscribe(self, target: str) -> None:
        """Stop sending pages to a target."""
        with self._lock:
            self._monitors.pop(target, None)

    def start(self, t_s: float) -> Reading | None:
        """Start a reading if one is due and none is running. Returns the new reading, or None."""
        with self._lock:
            now_s = self._monotonic()
            if self._run is not None or self._retired or now_s + EARLY_S < self._due_s:
                return None
            run = self._run = Reading(t_s, now_s)
        try:
            _in_thread(lambda: self._read(run))
        except RuntimeError as error:
            with self._lock:
                self._run = None
                self._fail(CollectError(str(error), kind="internal"), t_s, 0.0)
            return None
        return run

    def give_up(self, t_s: float) -> None:
        """If the running reading takes longer than the hang limit, report that it hangs and ignore
        its result."""
        with self._lock:
            run = self._run
            late_s = 0.0 if run is None else self._monotonic() - run.started_s
            if run is None or late_s < self._hang_s:
                return
            why = f"{self._collector.name} is hanging: no answer for {span(late_s)}"
            hint = "run nvidia-smi on the node to check whether the driver hangs"
            error = CollectError(why, kind="timeout", hint=hint)
            if run.given_up:
                self._show(error, t_s, late_s)
            else:
                run.given_up = True
                self._fail(error, t_s, late_s)

    def retire(self) -> Event:
        """Stop reading. The collector is closed when no reading runs any more. Returns an event
        that is set when the collector is closed."""
        self._retired = True
        # Held for long only by `_read`, which closes the collector itself.
        if self._lock.acquire(timeout=TURN_S / 2):
            self._monitors.clear()
            is_running = self._run is not None
            self._lock.release()
            if not is_running:
                _in_thread(self._close)
        return self._closed

    def _close(self) -> None:
        if not self._closed.is_set():
            self._collector.close()
        self._closed.set()

    def _read(self, run: Reading) -> None:
        page, failed = None, None
        try:
            page = self._collector.collect()
        except CollectError as error:
            failed = error.detached()
        except Exception as error:
            log.exception("GPU reading crashed source=%s", self._collector.name)
            failed = CollectError(f"internal error: {error!r}", kind="internal", hint="see the log")
        with self._lock:
            self._run, retired = None, self._retired
            took_s = self._monotonic() - run.started_s
            if page is not None and not run.given_up and not retired:
                self._take(page, run.t_s, took_s)
            elif failed is not None and not run.given_up and not retired:
                self._fail(failed, run.t_s, took_s)
        run.done.set()
        if self._retired:
            self._close()

    def _take(self, page: GpuPage, t_s: float, took_s: float) -> None:
        name = self._collector.name
        if self._failing:
            log.info("GPU source up again source=%s failures=%d", name, self._failing)
        self._failing, self._last = 0, (t_s, page)
        self._due_s = float("-inf")
        lost = [note.text for note in page.notes if note.lost]
        for text in lost:
            self._log_once(logging.ERROR, text)
        self._logged.intersection_update(lost)
        error = "; ".join(lost)
        self.state = SourceState(name, t_s, not lost, took_s, error)
        for monitor in set(self._monitors.values()):
            monitor.take(t_s, page)

    def _fail(self, error: CollectError, t_s: float, took_s: float) -> None:
        message = _with_hint(error)
        if self._is_normal(error):
            wait_s = REDISCOVERY_S
            self._log_once(logging.INFO, message)
        else:
            if not self._failing:
                log.warning("GPU source failed source=%s error=%s", self._collector.name, message)
            wait_s = min(self._interval_s * 2 ** min(self._failing, 8), BACKOFF_MOST_S)
            self._failing += 1
        self._due_s = self._monotonic() - took_s + max(wait_s, self._interval_s)
        self._show(error, t_s, took_s)

    def _show(self, error: CollectError, t_s: float, took_s: float) -> None:
        self._last = error
        name, message = self._collector.name, _with_hint(error)
        normal = self._is_normal(error)
        self.state = None if normal else SourceState(name, t_s, False, took_s, message)
        for monitor in set(self._monitors.values()):
            monitor.failed(str(error), lost=error.kind == GPUS_LOST)

    def _is_normal(self, error: CollectError) -> bool:
        return self._optional and error.kind == NO_GPU

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.log(level, "GPU source reports source=%s detail=%s", self._collector.name, text)


def _with_hint(error: CollectError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


# --- All sources ----------------------------------------------------------------------------------
#
# A target's source is the page in `gpu_metrics`, NVML if that is `nvml`, none if it is `none`.
# Unset, it is the source discovered on this node (node_gpus.py), for targets on this node.
# Targets with the same source share it: it is read once per interval. node_gpus.py maps its
# GPUs to targets.


NVML, NONE = "nvml", "none"
"""The values of `gpu_metrics` that are not an address."""

CONNECT_S, READ_S = 3.0, 6.0
"""Maximum timeouts for a GPU page. Their sum is less than HANG_S."""

TURN_S = 0.2
ELSEWHERE = GpuReading(
    {}, ("gpu_*: no GPU source (the target is not on this node; gpu_metrics names its page)",)
)

Key = tuple[str, ...]
"""Identity of a source: its kind, address and access settings."""

NODE: Key = ("node",)


class Selection(Struct, frozen=True):
    """The GPUs that a target uses of a source, and the window of their signals. Targets with equal
    selections share a monitor."""

    key: Key
    claim: GpuClaim
    window_s: float


Subscription = tuple[Selection, GpuMonitor]
"""The GPU selection of a target, and the monitor for it."""


class GpuSources(Job):
    """All GPU sources of the daemon, read by a job at the GPU interval.

    Methods other than `cycle` and `collect` are thread-safe and never wait for a source.
    """

    first_in_s = 0.0

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
        self.every_s: float = settings["gpu_interval_s"]
        self._hang_s, self._monotonic = hang_s, monotonic
        self._lock, self._closed = Lock(), Event()
        self._sources: dict[Key, GpuSource] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._without: dict[str, GpuReading] = {}
        self._specs: Sequence[TargetSpec] = ()
        self._update_lock = Lock()
        self._used: dict[str, GpuClaim] = {}
        self.update(specs)

    def update(self, specs: Sequence[TargetSpec]) -> None:
        """Set the targets; unchanged ones keep their sources and monitors."""
        with self._update_lock:
            self._specs = specs
            self._update()

    def _update(self) -> None:
        specs = self._specs
        keys = {spec.name: self._key(spec) for spec in specs}
        sharing = Counter(keys.values())
        # Counted once per settings object: counting may read a file, and most targets share their
        # settings.
        stated_by = {id(spec.settings): spec.settings for spec in specs}
        counts = {key: gpu_count(settings) for key, settings in stated_by.items()}
        with self._lock:
            for name, (old, _) in self._subscriptions.items():
                if keys.get(name) != old.key:
                    self._sources[old.key].unsubscribe(name)
            monitors = dict(self._subscriptions.values())
            self._subscriptions = {
                spec.name: self._watch(
                    spec,
                    _selection(
                        spec,
                        key,
                        counts[id(spec.settings)],
                        alone=sharing[key] == 1,
                        used=self._used.get(spec.name, NO_CLAIM),
                    ),
                    monitors,
                )
                for spec in specs
                if (key := keys[spec.name]) is not None
            }
            self._without = {
                spec.name: NO_GPUS if spec.played or spec.gpu_metrics else ELSEWHERE
                for spec in specs
                if keys[spec.name] is None
            }
            for key in self._sources.keys() - set(keys.values()):
                self._sources.pop(key).retire()

    def set_used(self, target: str, used: GpuClaim) -> None:
        """Set the GPUs that a target's server was observed to use. Labels of the target that name
        its GPUs take precedence."""
        with self._update_lock:
            if self._used.get(target, NO_CLAIM) != used:
                self._used[target] = used
                self._update()

    def cycle(self) -> float | None:
        """Read all sources that are due at the current time."""
        self.collect(OWN_CLOCK())
        return None

    def collect(self, now_s: float) -> None:
        """Read all sources that are due. Returns when each has answered or timed out."""
        with self._lock:
            sources = list(self._sources.values())
        runs = [run for source in sources if (run := source.start(now_s))]
        until_s = time.monotonic() + self._hang_s
        for run in runs:
            while not run.done.is_set() and not self._closed.is_set():
                left_s = until_s - time.monotonic()
                if left_s <= 0 or run.done.wait(min(left_s, TURN_S)):
                    break
        for source in sources:
            source.give_up(now_s)

    def reading(self, spec: TargetSpec, t_s: float) -> GpuReading:
        """The newest reading of the target's GPUs."""
        subscription = self._subscriptions.get(spec.name)
        if subscription is None:
            return self._without.get(spec.name, NO_GPUS)
        return subscription[1].reading(t_s)

    def states(self, spec: TargetSpec) -> list[SourceState]:
        """The state of a target's GPU source, with a text on how its GPUs were matched. The list
        has at most one entry. It is empty on a node without a GPU, because a missing GPU is not a
        failure."""
        subscription = self._subscriptions.get(spec.name)
        if subscription is None:
            return []
        selection, monitor = subscription
        source = self._sources.get(selection.key)
        if source is None or (state := source.state) is None:
            return []
        return [replace(state, joined=monitor.reading(state.t_s).joined)]

    def close(self, timeout_s: float) -> None:
        """Close all sources. Waits at most `timeout_s` for a source that hangs."""
        self._closed.set()
        with self._lock:
            sources, self._sources, self._subscriptions = list(self._sources.values()), {}, {}
        until_s = time.monotonic() + timeout_s
        for closed in [source.retire() for source in sources]:
            closed.wait(max(0.0, until_s - time.monotonic()))

    def _watch(
        self, spec: TargetSpec, selection: Selection, monitors: dict[Selection, GpuMonitor]
    ) -> Subscription:
        """The subscription of a target. `monitors` has one monitor per selection; a missing monitor
        is created and added."""
        interval_s = spec.settings["gpu_interval_s"]
        source = self._sources.get(selection.key)
        if source is None:
            source = self._sources[selection.key] = GpuSource(
                self._collector(spec, selection.key),
                interval_s=interval_s,
                hang_s=self._hang_s,
                optional=selection.key == NODE,
                monotonic=self._monotonic,
            )
        monitor = monitors.get(selection)
        if monitor is None:
            monitor = monitors[selection] = GpuMonitor(
                window_s=selection.window_s, interval_s=interval_s, choose=selection.claim.choose
            )
        source.subscribe(spec.name, monitor)
        return selection, monitor

    def _key(self, spec: TargetSpec) -> Key | None:
        setting = (spec.gpu_metrics or "").strip()
        if setting == NONE or spec.played:
            return None
        if setting == NVML:
            return (NVML,)
        if setting:
            access = json.dumps(asdict(_access(spec, setting)), sort_keys=True)
            return ("page", metrics_url(setting), access)
        return NODE if on_this_node(spec) else None

    def _collector(self, spec: TargetSpec, key: Key) -> GpuCollector:
        limits = spec.settings.limits()
        if key[0] == NVML:
            return NvmlCollector(self._load, monotonic=self._monotonic)
        if key == NODE:
            fetch = _short(self._settings.fetch())
            return NodeCollector(fetch, limits, load=self._load, url=self._usual_url)
        return DcgmCollector(key[1], _access(spec, key[1]), limits)


def _selection(
    spec: TargetSpec, key: Key, count: int | None, *, alone: bool, used: GpuClaim
) -> Selection:
    """The GPU selection of a target.

    `count` is its number of GPUs, None if not stated. `alone`: no other target uses the source.
    `used` are the GPUs that its server was observed to use.
    """
    claim = claim_of(spec.labels, count=count)
    unstated = not (claim.uuids or claim.indexes or claim.pod)
    if unstated and used.uuids:
        return Selection(key, replace(claim, uuids=used.uuids), spec.settings["window_s"])
    if unstated and used.pod:
        claim = replace(claim, pod=used.pod, namespace=used.namespace)
    # Whether others use the source matters only if GPUs are mapped by count.
    return Selection(key, replace(claim, alone=unstated and alone), spec.settings["window_s"])


def _access(spec: TargetSpec, url: str) -> FetchSettings:
    """The settings for fetching a GPU page. They contain no credentials of the target, because the
    page belongs to another server."""
    fetch = _short(spec.settings.fetch())
    same_server = parse_target(url).origin == parse_target(spec.address).origin
    return fetch if same_server else fetch.without_secrets()


def _short(fetch: FetchSettings) -> FetchSettings:
    return replace(
        fetch,
        connect_timeout_s=min(fetch.connect_timeout_s, CONNECT_S),
        read_timeout_s=min(fetch.read_timeout_s, READ_S),
    )


def gpu_count(settings: Settings) -> int | None:
    """The number of GPUs of a server, according to its settings. None if not stated."""
    try:
        return stated(settings).server_gpus
    except SettingsError:  # reported when the target is started
        return None
