"""The state of a server beside its signals: health, process, canary, GPUs, adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

LOOP_S = 600.0
"""Several processes of one server within this many seconds are a restart loop."""


class ServerState(Struct, frozen=True):
    """The state of a server after a failed scrape; None for what is unknown.

    - `healthy`: GET /health returns status 200.
    - `pid`: the process that served the newest page, or one started since. `runs` and `listens` are
      about this process.
    - `processes`: number of the server's processes within `LOOP_S`.
    - `oom_kills`: processes that the kernel killed in the server's control group since its facts
      were read.
    - `exit_words`: systemd's description of how the unit ended.
    """

    healthy: bool | None = None
    pid: int | None = None
    runs: bool | None = None
    listens: bool | None = None
    processes: int = 0
    oom_kills: int | None = None
    exit_words: str = ""

    def words(self) -> tuple[str, ...]:
        """The state as sentences, one for each part that is known."""
        lines: list[str] = []
        if self.healthy is not None:
            lines.append(f"GET /health {'returns 200' if self.healthy else 'fails too'}")
        if self.runs is not None:
            where = {True: " and listens", False: " but does not listen", None: ""}[self.listens]
            lines.append(f"process {self.pid} {f'runs{where}' if self.runs else 'has ended'}")
        if self.oom_kills:
            lines.append(f"the kernel's OOM killer ended {self.oom_kills} of its processes")
        if self.exit_words:
            lines.append(f"systemd: {self.exit_words}")
        if self.processes > 1:
            lines.append(
                f"the server was started {self.processes} times within {LOOP_S / 60:.0f} minutes"
            )
        return tuple(lines)

    @property
    def is_starting(self) -> bool:
        """Whether the process runs and does not listen yet."""
        return bool(self.runs) and self.listens is False

    @property
    def is_broken(self) -> bool:
        """Whether the server is known to have failed; otherwise it may be restarting on purpose."""
        return bool(self.oom_kills or self.exit_words or self.processes > 1)

    @property
    def lever(self) -> str:
        """What to do about a target that is down, in this state of the server; empty if unknown."""
        if self.oom_kills:
            return "Raise the memory limit of the container or unit, or lower vLLM's CPU memory."
        if self.processes > 1:
            return "The server fails after each start: read its log."
        if self.runs is False:
            return "Read the end of the server's log for the reason, then start it."
        if self.runs and self.listens is False:
            return (
                "The process runs but does not listen: it is starting, or it hangs. Read its log."
            )
        return ""


NO_STATE = ServerState()


class CanaryState(Struct, frozen=True):
    """The newest canary requests of a target.

    - `latency_s`: latency of the newest request; None if it had no answer.
    - `failures`: unanswered requests in a row, up to now.
    - `since_s`: when the first of these was sent.
    - `error`: the error of the newest of these.
    - `refused`: why the newest request was rejected or not sent; the other fields are then
      unchanged.
    """

    latency_s: float | None = None
    failures: int = 0
    since_s: float = 0.0
    error: str = ""
    refused: str = ""


# --- GPUs and adapters ----------------------------------------------------------------------------


GPU_BUSY_FROM = 0.5
"""A GPU that is busy less than this share of the time may lower its clocks."""

CLOCK_SEEN = "gpu_sm_clock_seen_hz"
"""Key of the highest SM clock that a busy GPU has had since it is watched."""


class XidSeen(Struct, frozen=True):
    """An XID that a GPU reported.

    `since_s`: when it was first seen; None if the first scrape already had it. `worked_since`: the
    GPU has done work since then.
    """

    code: int
    since_s: float | None
    worked_since: bool = False


class GpuState(Struct, frozen=True):
    """One GPU now.

    `values` are the signals of collector/signals/table.py; None for unknown. `is_awake`: the GPU
    reports its clock and power, and uses energy.
    """

    index: str
    uuid: str
    node: str
    model: str
    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    xids: Sequence[XidSeen] = ()
    is_awake: bool = False

    @property
    def name(self) -> str:
        """The GPU's name in messages: `GPU 3 of node-7`."""
        return gpu_name(self.uuid, self.index, self.node)

    def get(self, signal: str) -> float:
        """A signal's value; 0 if it has none."""
        return self.values.get(signal) or 0.0


def gpu_name(uuid: str, index: str, node: str) -> str:
    """A GPU's name in messages: `GPU 3 of node-7`; without the number where it is unknown."""
    gpu = f"GPU {index or uuid}".rstrip()
    return f"{gpu} of {node}" if node else gpu


class AdapterUse(Struct, frozen=True):
    """One LoRA adapter in the window.

    `turns`: it got a slot at least this many times. `unseen_s`: seconds since it last ran.
    """

    name: str
    turns: int
    unseen_s: float
