"""Queries a vLLM server for its version, models and state. If its metrics page cannot be read, its
state comes from /health, its process and its systemd unit. I/O edge."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.server.process import control_groups, is_local, numbers_in, running_server
from kneewatch.collector.engines.engine_kind import engine_kinds
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import METRICS_PATH, FetchSettings, parse_target
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.deployment.server_facts import (
    DEGREES_MAX,
    MAX_MODEL_LEN,
    MODEL_PATH,
    PROCESS,
    SERVER,
    TENSOR_PARALLEL,
    TEXT_MAX_CHARS,
    VERSION,
    SourceReading,
    printable,
    version_of,
)
from kneewatch.diagnose.deployment.server_state import LOOP_S, NO_STATE, ServerState
from kneewatch.diagnose.deployment.vllm_flags import LARGEST
from kneewatch.diagnose.verdict import Value

BODY_MAX_BYTES = 512 * 1024
"""Maximum size of an answer: /v1/models has 1 kB per model, /server_info up to 100 kB."""

TIMEOUT_MAX_S = 3.0
"""Maximum seconds to wait for an answer. A healthy server answers at once, and the next scrape must
not be delayed."""

HEALTH = "/health"
MODELS_MAX = 100
OLDEST = (0, 2, 0)
"""The first version of vLLM with an OpenAI-compatible server and metrics."""

Values = dict[str, Value]


def ask_server(target: str, settings: FetchSettings, now_s: float) -> SourceReading:
    """The facts that the server at `target` reports. A failed request adds a note.

    After a request without an answer, no more requests are sent: a server that hangs costs only one
    timeout.
    """
    values: Values = {}
    notes: list[str] = []
    for request, (read, optional) in REQUESTS.items():
        try:
            values |= read(answer_of(target, request, settings))
        except CollectError as error:
            if not (optional and error.kind in ("not_found", "http_status", "auth")):
                hint = f"; {error.hint}" if error.kind == "auth" else ""
                notes.append(f"GET {request}: {error}{hint}")
            if error.kind in ("timeout", "refused", "dns", "tls"):
                break
        except (ValueError, RecursionError) as exc:
            notes.append(f"GET {request}: not an answer of vLLM: {printable(str(exc))}")
    if PROGRAM_VERSION in values:  # such an engine has no /version
        notes = [note for note in notes if not note.startswith("GET /version:")]
    return SourceReading(SERVER, now_s, values, notes=tuple(notes))


def is_healthy(target: str, settings: FetchSettings) -> bool:
    """Whether the server at `target` answers GET /health with status 200."""
    try:
        answer_of(target, HEALTH, settings)
    except CollectError:
        return False
    return True


def answer_of(
    target: str,
    request: str,
    settings: FetchSettings,
    *,
    post: bytes | None = None,
    timeout_s: float = TIMEOUT_MAX_S,
) -> bytes:
    """The body of a server's answer to a GET request for `request`; with `post`, to a POST request
    with this JSON document.

    `target` is the address of the server's metrics page; `request` is a path.

    Raises:
        CollectError: the server does not answer, or not with status 200.
    """
    address = parse_target(target)
    path, _, _ = address.path.partition("?")
    prefix = path.removesuffix(METRICS_PATH) if path.endswith(METRICS_PATH) else ""
    settings = replace(
        settings,
        body_limit_bytes=min(settings.body_limit_bytes, BODY_MAX_BYTES),
        connect_timeout_s=min(settings.connect_timeout_s, TIMEOUT_MAX_S),
        read_timeout_s=min(settings.read_timeout_s, timeout_s),
    )
    url = replace(address, path=prefix + request).full_url()
    fetcher = Fetcher(url, settings, any_answer=True, post=post)
    try:
        return fetcher.get().body
    finally:
        fetcher.close()


def _object(body: bytes) -> Mapping[str, object]:
    document: object = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - wrong data, not a wrong type in code
    return cast("Mapping[str, object]", document)


def _version(body: bytes) -> Values:
    text = _object(body).get("version")
    version = version_of(text) if isinstance(text, str) else None
    # A build from source without git tags reports version 0.1.dev1.
    if not isinstance(text, str) or version is None or version < OLDEST:
        raise ValueError(f"{str(text)[:40]!r} is not the version of a release")
    return {VERSION: _text(text)}


def _models(body: bytes) -> Values:
    """From /v1/models: the served names, the path of the model if there is only one, and the
    model's maximum context length in tokens."""
    rows = _object(body).get("data")
    if not isinstance(rows, list) or not rows:
        raise ValueError("no models")
    cards = [
        cast("Mapping[str, object]", card)
        for card in cast("list[object]", rows)[:MODELS_MAX]
        if isinstance(card, dict)
    ]
    # Adapters have the model that they extend as parent.
    models = [card for card in cards if not card.get("parent")]
    values: Values = {}
    roots = {root for model in models if isinstance(root := model.get("root"), str)}
    if len(roots) == 1:
        values[MODEL_PATH] = _text(roots.pop())
    lengths = {
        length for model in models if (length := _count(model.get("max_model_len"))) is not None
    }
    if len(lengths) == 1:
        values[MAX_MODEL_LEN] = lengths.pop()
    return values


def _load(body: bytes) -> Values:
    load = _object(body).get("server_load")
    return {"server_load": load} if isinstance(load, int) and 0 <= load < LARGEST else {}


def _sleeping(body: bytes) -> Values:
    sleeping = _object(body).get("is_sleeping")
    return {"sleeping": sleeping} if isinstance(sleeping, bool) else {}


CONFIG_KEYS = {
    "tensor_parallel_size": TENSOR_PARALLEL,
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
"""Keys of vLLM's configuration whose value is a count, with the name of the fact."""

PROGRAM_VERSION = "program_version"
"""Fact: the title and version of an engine that is not vLLM."""


def _own_config(document: Mapping[str, object]) -> Values:
    """The counts in the configuration of an engine whose keys are its flags."""
    for kind in engine_kinds():
        texts = {
            flag[2:].replace("-", "_"): document[key]
            for flag, own in kind.flags.items()
            if (key := own[2:].replace("-", "_")) in document
        }
        if CONFIG_KEYS.keys() <= texts.keys():
            version = document.get("version")
            named = f"{kind.title} {version}" if isinstance(version, str) else kind.title
            return {PROGRAM_VERSION: _text(named), **_counts(texts)}
    return {}


def _config(body: bytes) -> Values:
    """The counts in /server_info. The server returns its configuration as text or as JSON."""
    document = _object(body)
    config = document.get("vllm_config")
    if config is None and (values := _own_config(document)):
        return values
    if isinstance(config, str):
        pairs = re.findall(r"\b(\w{1,40})=(\d{1,15})\b", config)
        texts: dict[str, object] = {key: int(text) for key, text in pairs}
    elif isinstance(config, dict):
        sections = cast("Mapping[str, object]", config).values()
        texts = {
            key: value
            for section in sections
            if isinstance(section, dict)
            for key, value in cast("dict[str, object]", section).items()
        }
    else:
        raise ValueError("no vllm_config")  # noqa: TRY004 - as above
    return _counts(texts)


def _counts(texts: Mapping[str, object]) -> Values:
    counts = {name: _count(texts.get(key)) for key, name in CONFIG_KEYS.items()}
    return {
        name: count
        for name, count in counts.items()
        if count is not None and (name != TENSOR_PARALLEL or count <= DEGREES_MAX)
    }


def _count(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 < cast("int", value) <= LARGEST else None  # type: ignore[return-value]


def _text(text: str) -> str:
    if not text.isprintable() or len(text) > TEXT_MAX_CHARS:
        raise ValueError(f"{text[:40]!r} is not a name")
    return text


Reader = Callable[[bytes], Values]

REQUESTS: Mapping[str, tuple[Reader, bool]] = {
    "/version": (_version, False),
    "/v1/models": (_models, False),
    HEALTH: (lambda _body: {"healthy": True}, False),
    "/load": (_load, True),
    "/is_sleeping": (_sleeping, True),
    "/server_info?config_format=json": (_config, True),
}
"""For each path: the function that reads the answer, and whether a server may lack the path.

/is_sleeping and /server_info exist only with VLLM_SERVER_DEV_MODE=1.
"""


# The state of a server whose page cannot be read, by /health, its process and its systemd unit.
# I/O edge.


ANSWERED = ("http_status", "timeout", "auth", "too_large", "truncated", "not_found")
"""Kinds of scrape errors after which the server may still be healthy."""

SYSTEMCTL_S = 2.0
_UNIT = re.compile(r"[A-Za-z0-9@_:.\\-]{1,200}\.service")


class ServerStart(Struct, frozen=True):
    """A process of the server: its id, its start time and its systemd unit. `oom_kills` is the
    number of OOM kills in its control group when the process was first observed; None if
    unknown."""

    pid: int
    started_s: float
    unit: str
    events_file: Path | None
    oom_kills: int | None


class Liveness:
    """Follows the processes of a target's server on this node, to report the server's state after a
    failed scrape."""

    def __init__(self, address: str, fetch: FetchSettings) -> None:
        self._target, self._fetch = address, fetch
        address_ = parse_target(address)
        self._host, self._port = address_.host, address_.port
        self._processes: list[ServerStart] = []

    def note(self, readings: Sequence[SourceReading]) -> None:
        """Remember the process that `readings` are about."""
        for reading in readings:
            pid, started_s = reading.values.get("pid"), reading.values.get("process_started_s")
            if reading.source == PROCESS and isinstance(pid, int) and isinstance(started_s, float):
                self._add(pid, started_s, str(reading.values.get("unit", "")))

    def state(self, error: CollectError, now_s: float) -> ServerState:
        """The state of the server after a failed scrape."""
        healthy = is_healthy(self._target, self._fetch) if error.kind in ANSWERED else None
        state = replace(NO_STATE, healthy=healthy)
        return self._of_process(state, now_s) if is_local(self._host) else state

    def _of_process(self, state: ServerState, now_s: float) -> ServerState:
        # Lazy: only for targets on this node.
        import psutil

        try:
            newest, listens = running_server(self._host, self._port)
            if newest is not None:
                self._add(newest.pid, newest.create_time(), "")
        except (psutil.Error, OSError):
            return state
        if not self._processes:
            return state
        last = self._processes[-1]
        runs = _runs(last)
        recent = [start for start in self._processes if now_s - start.started_s <= LOOP_S]
        return replace(
            state,
            pid=last.pid,
            runs=runs,
            listens=listens if runs else None,
            processes=len(recent),
            oom_kills=max((_oom_kills_since(start) or 0 for start in self._processes), default=0)
            or None,
            exit_words="" if runs else _exit_words(last.unit),
        )

    def _add(self, pid: int, started_s: float, unit: str) -> None:
        if any((start.pid, start.started_s) == (pid, started_s) for start in self._processes):
            return
        events_file = _events_file(pid)
        kills = None if events_file is None else _oom_kills(events_file)
        unit = unit or (self._processes[-1].unit if self._processes else "")
        # Keep sixteen at most: that many already show a restart loop.
        self._processes = [*self._processes, ServerStart(pid, started_s, unit, events_file, kills)][
            -16:
        ]


def _runs(start: ServerStart) -> bool:
    import psutil

    try:
        process = psutil.Process(start.pid)
        return process.create_time() == start.started_s and process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def _events_file(pid: int) -> Path | None:
    """The file memory.events of the process's control group (version 2). None with version 1, and
    for the root group, which has no such file."""
    files = (group / "memory.events" for group in control_groups(pid)[:1])
    return next((file for file in files if file.is_file()), None)


def _oom_kills(file: Path) -> int | None:
    kills = numbers_in(file).get("oom_kill")
    return None if kills is None else int(kills)


def _oom_kills_since(start: ServerStart) -> int | None:
    """Number of OOM kills in the process's control group since the process was first observed. None
    if unknown."""
    if start.events_file is None or start.oom_kills is None:
        return None
    now = _oom_kills(start.events_file)
    return None if now is None else max(0, now - start.oom_kills)


def _exit_words(unit: str) -> str:
    """A text on how a systemd unit ended. Empty without systemd, or if the unit did not fail."""
    if not _UNIT.fullmatch(unit):
        return ""
    command = ("systemctl", "show", "--property=Result,ExecMainStatus,NRestarts", "--", unit)
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SYSTEMCTL_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if done.returncode or shown.get("Result", "success") == "success":
        return ""
    return (
        f"{unit} ended with {shown['Result']}, status {shown.get('ExecMainStatus', '?')}, "
        f"{shown.get('NRestarts', '?')} restarts"
    )
