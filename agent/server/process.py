"""Finds the vLLM process that listens on a target's port on this node, and reads its command line,
the files named there, and the host's signals. I/O edge.

psutil is imported only for targets on this node, and to learn the node's addresses.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector import files
from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.http.address import parse_target
from kneewatch.diagnose.deployment.server_facts import PROCESS, SourceReading, printable
from kneewatch.diagnose.deployment.vllm_flags import CommandLine, process_command, with_config_file
from kneewatch.diagnose.verdict import Value

if TYPE_CHECKING:
    import psutil


YAML_MAX_BYTES = 64 * 1024


class FileError(KneewatchError):
    """A file is missing, too large, or of the wrong kind. The message never quotes the file."""


def read_file(path: Path, most_bytes: int, *, user_id: int) -> bytes:
    """The contents of a regular file. Links are followed.

    The user `user_id` must be allowed to read the file, because kneewatch may have more rights than
    the program that names the file.

    Raises:
        FileError: the file does not exist, has more than `most_bytes`, or the user may not read it.
    """
    try:
        return files.read_file(path, most_bytes, partial(_may_read, user_id))
    except OSError as exc:
        raise FileError(f"{path} cannot be read: {exc.strerror}") from exc


def _may_read(user_id: int, descriptor: int, status: os.stat_result) -> bool:
    """Whether a user may read an opened file and enter all folders above it."""
    if user_id == 0:
        return True
    groups = _groups(user_id)
    # Where the file is that was opened, whatever its path leads to by now.
    opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - may be no path
    return _permits(status, os.R_OK, user_id, groups) and all(
        _permits(folder.stat(), os.X_OK, user_id, groups) for folder in opened.parents
    )


def _permits(status: os.stat_result, right: int, user_id: int, groups: Sequence[int]) -> bool:
    """Whether the mode of a file gives a user a right (R_OK or X_OK)."""
    if status.st_uid == user_id:
        return bool(status.st_mode >> 6 & right)
    return bool(status.st_mode >> (3 if status.st_gid in groups else 0) & right)


def _groups(user_id: int) -> Sequence[int]:
    try:
        user = pwd.getpwuid(user_id)
    except KeyError:
        return ()
    return os.getgrouplist(user.pw_name, user.pw_gid)


def read_yaml(path: Path, *, user_id: int) -> Mapping[str, object]:
    """The keys and values of a YAML file for `vllm serve --config`.

    Raises:
        FileError: the file cannot be read, or is not such a YAML file.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise FileError(f"{path} is not named .yaml or .yml, as vLLM requires")
    data = read_file(path, YAML_MAX_BYTES, user_id=user_id)
    try:
        document = files.yaml_document(data)
    except ValueError:
        raise FileError(f"{path} is not YAML") from None
    if not isinstance(document, dict):
        raise FileError(f"{path} is not a table of flags")
    keys = cast("Mapping[object, object]", document)
    return {str(key): value for key, value in keys.items()}


# --- Finds the vLLM process that listens on a target's port on this node. I/O edge ----------------


Read = TypeVar("Read")

LISTENERS_MAX = 64
ANCESTORS_MAX = 3
"""Maximum number of parent processes to search for vLLM's command line. API server processes that
share a port are children of the process with the command line."""

DEFAULT_PORT = 8000
"""The port of `vllm serve` without --port."""

VARIABLES_MAX = 50
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_CONTAINER = re.compile(r"(?:^|[/-])([0-9a-f]{64})(?:\.scope)?(?:/|$)", re.MULTILINE)
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")

ALLOW = (
    "run kneewatch as root or as the server's user, and not in its own container (systemd: "
    "User=, ProtectProc=default), or set launch_file"
)


class ServerProcess(Struct, frozen=True):
    """A vLLM process. `folder` is its working folder. `folder` and `environ` are None if they
    cannot be read. `shares_files`: a path refers to the same file for the process and for
    kneewatch."""

    pid: int
    launch: CommandLine
    user_id: int
    folder: Path | None
    environ: Mapping[str, str] | None
    shares_files: bool


def read_process(target: str, now_s: float) -> tuple[SourceReading, ServerProcess | None]:
    """The facts about the process behind a target, and the process. For a target on another node:
    no facts, and None.

    If another program listens on the port, or something cannot be read, a note says so.
    """
    address = parse_target(target)
    nothing = SourceReading(PROCESS, now_s)
    if not is_local(address.host):
        return nothing, None
    import psutil

    try:
        listeners = _listeners(address.host, address.port)
    except (psutil.Error, OSError) as exc:
        note = f"port {address.port}: cannot list this node's sockets: {printable(str(exc))}"
        return replace(nothing, notes=(note,)), None
    pids = {pid for pid in listeners if pid is not None}
    if not pids:
        note = f"port {address.port}: cannot read the process that listens there; {ALLOW}"
        return (replace(nothing, notes=(note,)) if listeners else nothing), None
    others: list[str] = []
    for pid in sorted(pids)[:LISTENERS_MAX]:
        try:
            server = _server_process(psutil.Process(pid))
            if server is not None:
                return _facts(*server, now_s)
            others.append(f"{psutil.Process(pid).name()} (pid {pid})")
        except (psutil.Error, OSError) as exc:
            others.append(f"pid {pid}: {type(exc).__name__}")
    note = f"port {address.port}: used by {', '.join(others[:3])}, which is not vLLM"
    return replace(nothing, notes=(printable(note),)), None


def is_local(host: str) -> bool:
    """Whether the host of a target is this node.

    Host names are not resolved: a lookup could hang, and its result can change.
    """
    host = host.partition("%")[0].lower()
    if host in ("localhost", socket.gethostname().lower()) or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    import psutil

    own = {
        entry.address.partition("%")[0] for row in psutil.net_if_addrs().values() for entry in row
    }
    return str(address) in own


def running_server(host: str, port: int) -> tuple[psutil.Process | None, bool]:
    """The vLLM process that listens on the port of this node, and True. If no process listens: the
    process that was started last with this port (None if there is none), and False.

    Raises:
        psutil.Error: the node's processes cannot be listed.
        OSError: as above.
    """
    import psutil

    for pid in _listeners(host, port):
        if pid is not None and (server := _server_process(psutil.Process(pid))) is not None:
            return server[0], True
    started: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            launch = process_command(process.cmdline())
            if launch is not None and (launch.count("--port") or DEFAULT_PORT) == port:
                started.append(process)
    return max(started, key=lambda process: process.create_time(), default=None), False


def _listeners(host: str, port: int) -> set[int | None]:
    """Ids of the processes that listen on the port. None stands for a process that kneewatch may
    not see.

    If one socket is bound to the host's address and another one to all addresses, only the first
    one counts, because it gets the connections.
    """
    import psutil

    sockets = [
        (_bound_to(connection.laddr.ip), connection.pid)
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
    ]
    exact = {pid for bound, pid in sockets if _is_bound_to(bound, host)}
    return exact or {pid for bound, pid in sockets if bound.is_unspecified}


def _bound_to(text: str) -> IPv4Address | IPv6Address:
    address = ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_bound_to(bound: IPv4Address | IPv6Address, host: str) -> bool:
    try:
        at = _bound_to(host)
    except ValueError:
        is_loopback = host.lower().endswith("localhost")
    else:
        if not at.is_unspecified:
            return bound == at
        is_loopback = True
    return bound.is_loopback if is_loopback else not bound.is_unspecified


def _server_process(process: psutil.Process) -> tuple[psutil.Process, CommandLine] | None:
    """The process with vLLM's command line: this process or one of its ancestors. None if there is
    none."""
    at: psutil.Process | None = process
    for _ in range(ANCESTORS_MAX + 1):
        if at is None:
            return None
        words = at.cmdline()
        launch = process_command(words)
        if launch is not None:
            return at, launch
        if not _is_worker(words):
            return None
        at = at.parent()
    return None


def _is_worker(words: list[str]) -> bool:
    """Whether vLLM may have started a process: the process was renamed by vLLM, or started by
    multiprocessing."""
    return bool(words) and (
        words[0].startswith("VLLM::") or any("multiprocessing." in word for word in words[1:4])
    )


def _facts(
    process: psutil.Process, launch: CommandLine, now_s: float
) -> tuple[SourceReading, ServerProcess]:
    values: dict[str, Value] = {"pid": process.pid, "process_started_s": process.create_time()}
    values |= place(text_of(Path(f"/proc/{process.pid}/cgroup")))
    notes: list[str] = []
    environ, folder = _if_readable(process.environ), _if_readable(process.cwd)
    if environ is None:
        notes.append(f"pid {process.pid}: cannot read its environment; {ALLOW}")
    else:
        values |= shown_variables(environ)
    server = ServerProcess(
        process.pid,
        launch,
        process.uids().effective,
        None if folder is None else Path(folder),
        environ,
        shares_files=namespace(process.pid, "mnt") == namespace("self", "mnt") != "",
    )
    if "--config" in launch.flags:
        try:
            launch = _with_config(launch, server)
        except FileError as exc:
            notes.append(printable(f"--config: {exc}"))
    reading = SourceReading(PROCESS, now_s, values, command_line=launch, notes=tuple(notes))
    return reading, replace(server, launch=launch)


def _with_config(launch: CommandLine, server: ServerProcess) -> CommandLine:
    path = Path(launch.flags["--config"])
    if not server.shares_files or (not path.is_absolute() and server.folder is None):
        raise FileError(f"{path} is in the server's container; set launch_file")
    document = read_yaml((server.folder or Path("/")) / path, user_id=server.user_id)
    return with_config_file(launch, document)


def container_id(cgroup: str) -> str:
    """The container id in the text of /proc/PID/cgroup. Empty outside a container."""
    container = _CONTAINER.search(cgroup)
    return "" if container is None else container[1]


def place(cgroup: str) -> dict[str, Value]:
    """The systemd unit and the container in the text of /proc/PID/cgroup, as facts."""
    container, unit = container_id(cgroup), _UNIT.search(cgroup)
    values: dict[str, Value] = {"container": container[:12]} if container else {}
    return values if unit is None else values | {"unit": printable(unit[1])}


def shown_variables(environ: Mapping[str, str]) -> dict[str, Value]:
    """The variables of vLLM, and CUDA_VISIBLE_DEVICES. Variables whose names suggest a secret are
    left out."""
    names = [
        name
        for name in sorted(environ)
        if name == "CUDA_VISIBLE_DEVICES" or (name.startswith("VLLM_") and not _SECRET.search(name))
    ]
    return {printable(name): printable(environ[name]) for name in names[:VARIABLES_MAX]}


def _if_readable(read: Callable[[], Read]) -> Read | None:
    """The result of `read`. None if the process no longer exists or may not be read."""
    import psutil

    try:
        return read()
    except (psutil.Error, OSError):
        return None


def namespace(process: int | str, kind: str) -> str:
    """The id of a process's namespace, such as `mnt:[4026531841]`. Empty if it cannot be read."""
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")  # noqa: PTH115 - it is no path
    except OSError:
        return ""


# --- The host signals of a process: memory of its control group, CPU pressure and steal time ------


CGROUPS = Path("/sys/fs/cgroup")
"""The folder of the control groups (version 2)."""

PROC = Path("/proc")
TEXT_MAX_CHARS = 64 * 1024

STEAL_AT = 8
"""Index of the column of stolen time in /proc/stat. The guest times after it are already included
in other columns."""


class HostReader:
    """Reads the host signals of one process. Keeps the last CPU times, because steal time is a
    rate."""

    def __init__(self, pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self.pid = pid
        self._cgroups, self._proc = cgroups, proc
        self._cpu: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """The host signals. Signals that cannot be read are left out."""
        groups = control_groups(self.pid, cgroups=self._cgroups, proc=self._proc)
        signals = host_memory(groups)
        pressure = self._pressure(groups)
        if pressure is not None:
            signals["host_cpu_pressure_ratio"] = pressure
        before, self._cpu = self._cpu, self._cpu_times()
        if before is not None and self._cpu is not None and self._cpu[1] > before[1]:
            stolen, total = self._cpu[0] - before[0], self._cpu[1] - before[1]
            signals["host_cpu_steal_ratio"] = max(0.0, stolen / total)
        return signals

    def _pressure(self, groups: Sequence[Path]) -> float | None:
        """Share of the last minute (0-1) in which a task waited for a CPU, in the process's control
        group; without a control group, on the whole node. None if unknown."""
        files = [group / "cpu.pressure" for group in groups[:1]]
        for file in (*files, self._proc / "pressure/cpu"):
            for line in text_of(file).splitlines():
                kind, *pairs = line.split()
                if kind == "some":
                    averages = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                    with suppress(ValueError):
                        return float(averages.get("avg60", "")) / 100
        return None

    def _cpu_times(self) -> tuple[float, float] | None:
        """CPU time that the hypervisor took from the node, and total CPU time: both since the node
        started, in clock ticks. None if unknown."""
        words = text_of(self._proc / "stat").partition("\n")[0].split()
        if len(words) < STEAL_AT + 1 or words[0] != "cpu" or not all(map(str.isdecimal, words[1:])):
            return None
        times = [float(word) for word in words[1 : STEAL_AT + 1]]
        return times[-1], sum(times)


def host_memory(groups: Iterable[Path]) -> dict[str, float]:
    """Memory use and memory limit of one control group: the one with the least memory left. Empty
    if none of the groups has a limit."""
    limited = [
        (limit, max(0.0, used - numbers_in(group / "memory.stat").get("inactive_file", 0.0)))
        for group in groups
        if (limit := _number(group / "memory.max")) is not None
        and (used := _number(group / "memory.current")) is not None
    ]
    if not limited:
        return {}
    limit, used = min(limited, key=lambda row: row[0] - row[1])
    return {"host_memory_used_bytes": used, "host_memory_limit_bytes": limit}


def control_groups(pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> list[Path]:
    """The folders of a process's control group and of all groups above it (version 2). Empty with
    version 1, or if the process no longer exists."""
    lines = text_of(proc / str(pid) / "cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "")
    if not path or ".." in path:
        return []
    group = cgroups / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(cgroups)]


def _number(file: Path) -> float | None:
    """The number in a file. None if the file contains a word such as `max` instead."""
    text = text_of(file).strip()
    return float(text) if text.isdecimal() else None


def numbers_in(file: Path) -> dict[str, float]:
    """The values by name, from a file that has a name and a number in each line."""
    rows = (line.split() for line in text_of(file).splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def text_of(file: Path) -> str:
    """The text of a small file, cut to `TEXT_MAX_CHARS`. Empty if the file cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(TEXT_MAX_CHARS)
    except OSError:
        return ""
