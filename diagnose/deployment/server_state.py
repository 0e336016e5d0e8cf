"""What is known about a server beside its page: its health, its process, canary requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LOOP_S = 600.0
"""Seconds in which several processes of one server are a restart loop."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of a server after a failed scrape; None where it is unknown.

    `healthy`: GET /health has status 200. `runs` and `listens` are of the process `pid` that the
    newest page came from, or that was started since. `processes` counts the server's processes
    within `LOOP_S`, `oom_kills` those that the kernel killed in the server's control group since
    its facts were read. `exit_words` is how systemd says that the unit ended.
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
        """Whether its process runs and does not listen yet."""
        return bool(self.runs) and self.listens is False

    @property
    def is_broken(self) -> bool:
        """Whether it is known to have failed rather than to be restarted on purpose."""
        return bool(self.oom_kills or self.exit_words or self.processes > 1)

    @property
    def lever(self) -> str:
        """What to do about a target that is down in this state; empty if unknown."""
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


@dataclass(frozen=True, slots=True)
class CanaryState:
    """The newest canary requests of a target.

    `latency_s` is how long the newest took; None where it had no answer. `failures` counts those in
    a row that the server did not answer, the first of them sent at `since_s`; `error` is of the
    newest. `refused` says why the server did not accept the newest request, or why none was
    sent: then nothing new is known.
    """

    latency_s: float | None = None
    failures: int = 0
    since_s: float = 0.0
    error: str = ""
    refused: str = ""
