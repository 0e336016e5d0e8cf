"""Keeps the facts about a server up to date, from its HTTP answers, its process and its log. I/O
edge."""

from __future__ import annotations

import json
import math
import os
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kneewatch.agent.server.log import Journal, LogFollower, failure_of, reading_of
from kneewatch.agent.server.process import (
    FileError,
    HostReader,
    ServerProcess,
    namespace,
    read_file,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.gpu.nvml_calls import NodeGpu, Nvml, load_nvml, node_gpus
from kneewatch.collector.http.address import FetchSettings
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model, model_from_config
from kneewatch.diagnose.deployment.deployment import stated_of
from kneewatch.diagnose.deployment.server_facts import (
    CONFIG_FILE,
    GPU_UUIDS,
    GPUS,
    LOG,
    SERVER_GPUS,
    SourceReading,
    merge,
    models_reading,
    printable,
)
from kneewatch.diagnose.deployment.server_state import NO_STATE, ServerState
from kneewatch.diagnose.deployment.startup_log import Failure
from kneewatch.diagnose.engine.target_monitor import EngineMonitor, TargetMonitor
from kneewatch.diagnose.values import GpuReading
from kneewatch.diagnose.verdict import Value

if TYPE_CHECKING:
    from kneewatch.agent.server.probe import Liveness


READ_EVERY_S = 3600.0
READ_BYTES = 8 * 1024 * 1024
"""Maximum bytes of a log that are read per scrape. A large log must not delay the scrape."""

PROBE, SERVER_LOG = "server.probe", "server_log"
WATCH_SETTINGS = (PROBE, SERVER_LOG)
"""Settings that determine which sources are read."""

ENDED = "log not used: it ends with a failure but the server answers, so its log is elsewhere now"
OLD = "log not used: the server has restarted and the log has no newer start"

ReadServer = Callable[[str, FetchSettings, float], Sequence[SourceReading]]


def server_watch(
    address: str, settings: Settings, pod: SourceReading | None = None
) -> ServerWatch | None:
    """The watch of a live server. None if the settings allow no source. `pod` are the facts of the
    server's pod spec, if they are already known."""
    if not settings[PROBE]:
        return page_watch(address, settings) if settings[SERVER_LOG] else None
    # Lazy: most commands read no server.
    from kneewatch.agent.server.probe import Liveness

    fetch = settings.fetch()
    read = partial(read_server, pod=pod)
    return ServerWatch(
        address, fetch, read=read, log=_log(settings), liveness=Liveness(address, fetch)
    )


def page_watch(address: str, settings: Settings) -> ServerWatch:
    """A watch that merges facts from settings, page and log, and sends no request to the server."""
    return ServerWatch(address, settings.fetch(), read=None, log=_log(settings))


def _log(settings: Settings) -> LogFollower | None:
    path: str | None = settings[SERVER_LOG]
    return None if path is None else LogFollower(path)


def read_server(
    address: str, fetch: FetchSettings, now_s: float, *, pod: SourceReading | None = None
) -> Sequence[SourceReading]:
    """The facts from the server's HTTP answers, from its process on this node, and from a pod's
    spec. The pod is `pod`; if None, kneewatch's own pod."""
    # Lazy: most commands read no server.
    from kneewatch.agent.kubernetes import own_pod, read_pod
    from kneewatch.agent.server.probe import ask_server
    from kneewatch.agent.server.process import read_process

    readings = [ask_server(address, fetch, now_s)]
    shown, server = read_process(address, now_s)
    if pod is not None:
        pod = replace(pod, read_s=now_s)
    if server is not None:
        gpus = read_gpus(server.pid, now_s)
        pod = pod or own_pod(address, now_s)
        return [*readings, shown, pod, read_model(server, now_s), gpus]
    pod = pod or read_pod(address, now_s)
    # Where the pod has the command line, it does not matter why its process could not be read.
    return [*readings, pod] if pod.command_line is not None else [*readings, shown, pod]


class ServerWatch:
    """Collects the facts about one target's server.

    It queries the server only after a vLLM page was read; never if `read` is None.
    """

    def __init__(
        self,
        address: str,
        fetch: FetchSettings,
        *,
        read: ReadServer | None = read_server,
        log: LogFollower | Journal | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self._address, self._fetch, self._read = address, fetch, read
        self._liveness = liveness
        self.log, self._log_reading = log, SourceReading(LOG, 0.0)
        self._gpu_models: tuple[str, ...] = ()
        self._gpu_reading = models_reading((), 0.0)
        self._log_is_set, self._log_is_new = log is not None, True
        self._log_error = ""
        self._log_failure: Failure | None = None
        self._log_starts: int = 0
        self._old_log_starts: int = 0
        self._read_s = -math.inf
        self._host: HostReader | None = None
        self._readings: Sequence[SourceReading] = ()
        self._merged_of: object = None
        self._settings_s: float | None = None

    def read_log(self, t_s: float, monitor: TargetMonitor) -> None:
        """Read the new part of the log. Call this before the scrape of `t_s` is judged. If the log
        ends with a failure, the monitor is informed of the failure."""
        if self.log is None:
            return
        self._log_error, is_all = "", True
        try:
            is_all = self.log.read_rest(READ_BYTES)
        except SettingsError as error:
            # The file may be back at the next scrape.
            self._log_error = str(error)
        if self.log.log.failure is not self._log_failure:
            self._log_failure = self.log.log.failure
            failure = failure_of(self.log.log, stated_of(monitor.profile.stated), t_s)
            monitor.set_log_failure(failure, past=self._log_is_new)
        self._log_is_new = self._log_is_new and not is_all

    def state(self, t_s: float, error: CollectError, monitor: TargetMonitor) -> ServerState:
        """The state of the server after a failed scrape, from /health and its process."""
        if self._liveness is None:
            return NO_STATE
        state = self._liveness.state(error, t_s)
        if state.pid is not None and state.runs:
            self._find_log(state.pid, t_s, monitor)
        return state

    def _find_log(self, pid: int, t_s: float, monitor: TargetMonitor) -> None:
        """Start to follow the log of a process, unless a setting names the log."""
        if self._log_is_set or self._liveness is None:
            return
        # Lazy: only for a process on this node.
        from kneewatch.agent.server.log import log_of

        found = log_of(pid)
        if found is not None and (self.log is None or found.path != self.log.path):
            self.log, self._log_is_new = found, True
            self._log_starts, self._old_log_starts = 0, 0
            self.read_log(t_s, monitor)

    def is_due(self, t_s: float, engines: Iterable[EngineMonitor]) -> bool:
        """Whether the server of these engines is to be read again, which may take seconds."""
        restarted = any(engine.restart is not None for engine in engines)
        # A clock that was set back must not delay the next reading.
        return restarted or not 0 <= t_s - self._read_s < READ_EVERY_S

    def update(self, t_s: float, monitor: TargetMonitor, gpus: GpuReading) -> None:
        """Read the facts that are due and pass them to the monitor. Call this after the monitor has
        judged the page of `t_s`. `gpus` are the target's GPUs."""
        if self._settings_s is None:
            self._settings_s = t_s
        engines = [engine for engine in monitor.engines if engine.reader.last_s == t_s]
        if monitor.last_error is not None or not engines:
            return
        restarted = any(engine.restart is not None for engine in engines)
        if self.is_due(t_s, engines):
            self._readings = self._read(self._address, self._fetch, t_s) if self._read else ()
            self._read_s = t_s
            if self._liveness is not None:
                self._liveness.note(self._readings)
            pid = next((r.values["pid"] for r in self._readings if "pid" in r.values), None)
            self._host = HostReader(pid) if isinstance(pid, int) else None
            if self._host is not None:
                self._find_log(self._host.pid, t_s, monitor)
        if self._host is not None:
            monitor.set_host(self._host.read())
        self._read_log_facts(t_s, restarted=restarted)
        config = next((e.reader.config for e in engines if e.reader.config), dict[str, str]())
        names = sorted({engine.key.model for engine in engines if engine.key.model})
        if gpus.models != self._gpu_models:
            self._gpu_models = gpus.models
            self._gpu_reading = models_reading(gpus.models, t_s)
        merged_of = (
            self._readings, self._log_reading, self._gpu_reading, dict(config), names, monitor
        )  # fmt: skip
        if merged_of == self._merged_of:
            return
        self._merged_of = merged_of
        # The GPUs of the exporter's page, unless the driver reported which ones the server uses.
        by_driver = any(SERVER_GPUS in reading.values for reading in self._readings)
        facts, completed = merge(
            stated_of(monitor.profile.stated),
            [*self._readings, self._log_reading, *(() if by_driver else (self._gpu_reading,))],
            config=config,
            model_names=names,
            settings_s=self._settings_s,
            page_s=t_s,
        )
        monitor.set_server(facts, completed)

    def _read_log_facts(self, t_s: float, *, restarted: bool) -> None:
        """Use the facts of the log, but only if the log belongs to the process whose page was read
        at `t_s`."""
        if self.log is None:
            return
        log = self.log.log
        if restarted and log.starts == self._log_starts:
            self._old_log_starts = log.starts
        self._log_starts = log.starts
        if self._log_error:
            reading = SourceReading(LOG, t_s, notes=(self._log_error,))
        elif log.failure is not None:
            reading = SourceReading(LOG, t_s, notes=(ENDED,))
        elif log.starts == self._old_log_starts:
            reading = SourceReading(LOG, t_s, notes=(OLD,))
        else:
            reading = reading_of(log, t_s)
        if replace(reading, read_s=self._log_reading.read_s) != self._log_reading:
            self._log_reading = reading


# --- The facts that the page needs: model and GPUs ------------------------------------------------


CONFIG = "config.json"
CONFIG_MAX_BYTES = 1024 * 1024
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_REVISION = re.compile(r"[\w-][\w.-]{0,95}")


def read_model(server: ServerProcess, now_s: float) -> SourceReading:
    """The model, read from the config.json that the process uses. Empty for a model of the
    catalogue.

    If the file cannot be used, a note contains the reason.
    """
    name = server.launch.model
    nothing = SourceReading(CONFIG_FILE, now_s)
    if not name or "\0" in name or _in_catalogue(name):
        return nothing
    try:
        document = json.loads(_config(name, server))
        return SourceReading(CONFIG_FILE, now_s, model=model_from_config(name, document))
    except (FileError, SizingError) as exc:
        note = str(exc)
    except (ValueError, RecursionError):
        note = "not JSON"
    return SourceReading(CONFIG_FILE, now_s, notes=(f"{CONFIG} of the model: {printable(note)}",))


def _in_catalogue(name: str) -> bool:
    try:
        model(name)
    except SizingError:
        return False
    return True


def _config(name: str, server: ServerProcess) -> bytes:
    """The contents of the model's config.json.

    Raises:
        FileError: the file cannot be read, or a link leads out of the model's folder.
    """
    if not server.shares_files:
        raise FileError("the file is in the server's container; set model")
    folder = None if server.folder is None else server.folder / name
    if Path(name).is_absolute():
        folder = Path(name)
    if folder is not None and folder.is_dir():
        return _inside(folder, folder / CONFIG, server)
    cached = _snapshot(name, server)
    if cached is None:
        raise FileError(f"{name} is neither a folder nor in the Hugging Face cache; set model")
    return _inside(*cached, server)


def _snapshot(name: str, server: ServerProcess) -> tuple[Path, Path] | None:
    """The model's folder in the process's Hugging Face cache, and the config.json in it. None if
    not found."""
    hub = _hub(server)
    if hub is None or not _ID.fullmatch(name):
        return None
    folder = hub / f"models--{name.replace('/', '--')}"
    revision = server.launch.text("--revision") or "main"
    if not _REVISION.fullmatch(revision):
        return None
    reference = folder / "refs" / revision
    if reference.is_file():
        revision = _inside(folder, reference, server)[:100].decode("ascii", "replace").strip()
    if not _REVISION.fullmatch(revision):
        return None
    config = folder / "snapshots" / revision / CONFIG
    return (folder, config) if config.exists() else None


def _hub(server: ServerProcess) -> Path | None:
    """The folder of the Hugging Face cache: from the process's environment, else in the home folder
    of its user."""
    environ = server.environ or {}
    if "HF_HUB_CACHE" in environ:
        hub = Path(environ["HF_HUB_CACHE"])
    elif "HF_HOME" in environ:
        hub = Path(environ["HF_HOME"]) / "hub"
    else:
        try:
            home = environ.get("HOME") or pwd.getpwuid(server.user_id).pw_dir
        except KeyError:
            return None
        hub = Path(environ.get("XDG_CACHE_HOME") or Path(home) / ".cache") / "huggingface" / "hub"
    return hub if hub.is_absolute() else None


def _inside(folder: Path, path: Path, server: ServerProcess) -> bytes:
    """The contents of a file. Files in the cache are links to blobs; the target of a link must be
    in `folder` too.

    Raises:
        FileError: the file cannot be read, or a link leads out of `folder`.
    """
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        inside = resolved.is_relative_to(os.path.realpath(folder, strict=True))
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a path"
        raise FileError(f"{path} cannot be read: {reason}") from exc
    if not inside:
        raise FileError(f"{path} links to a file outside {folder}")
    return read_file(resolved, CONFIG_MAX_BYTES, user_id=server.user_id)


# --- The GPUs that a server's process on this node uses. I/O edge ---------------------------------


NODE_PIDS = "pid:[4026531836]"
"""The process-id namespace of the node itself (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

OTHER_PIDS = (
    "cannot tell which GPUs the server uses: the driver reports process ids of the node, which "
    "kneewatch's container does not see; set hostPID: true, or the setting gpu"
)
PARTS = "the server uses MIG instances: set gpu"


def read_gpus(
    pid: int, now_s: float, *, load: Callable[[], Nvml] = load_nvml, pids: str | None = None
) -> SourceReading:
    """The GPUs of a server's process and of its child processes. Without a driver there are no
    facts and no note.

    If these GPUs are unknown, but all GPUs of the node are of the same model, that model is a fact.
    `pids` is kneewatch's own process-id namespace; None: read it.
    """
    comparable = (namespace("self", "pid") if pids is None else pids) == NODE_PIDS
    try:
        gpus = node_gpus(_family(pid) if comparable else (), load)
    except CollectError as error:
        notes = () if error.kind == "no_gpu" else (f"GPUs of the server: {error}",)
        return SourceReading(GPUS, now_s, notes=notes)
    if not gpus:
        return SourceReading(GPUS, now_s)
    used = [gpu for gpu in gpus if gpu.is_used]
    if any(gpu.is_part for gpu in used):
        return SourceReading(GPUS, now_s, notes=(PARTS,))
    values = _model(used if comparable else gpus)
    if used:
        values[SERVER_GPUS] = len(used)
        values[GPU_UUIDS] = " ".join(gpu.uuid for gpu in used)
    return SourceReading(GPUS, now_s, values, notes=() if comparable else (OTHER_PIDS,))


def _model(gpus: Collection[NodeGpu]) -> dict[str, Value]:
    """Model and memory of the GPUs, if all are of the same model. Empty if they differ."""
    values = dict(models_reading([gpu.name for gpu in gpus], 0.0).values)
    values.pop(SERVER_GPUS, None)
    if "gpu_name" not in values:
        return {}
    bytes_each = {gpu.memory_bytes for gpu in gpus}
    least_bytes = min((size for size in bytes_each if size is not None), default=None)
    if least_bytes is not None:
        values["gpu_memory_gib"] = round(least_bytes / GIB, 2)
    return values


def _family(pid: int) -> set[int]:
    """The ids of a process and of all its descendants."""
    import psutil

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}
