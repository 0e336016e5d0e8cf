"""The steps of the live test: the load, what must be said of it, and what counts as wrong. Pure."""

from __future__ import annotations

from msgspec import Struct

from tests.lab.diagnosed import Said
from tests.lab.load import Seen

APART_RATIO = 0.25
TTFT_APART_S = 0.050
"""How far a mean may be from the client's; a TTFT so near is right whatever the ratio: the client
also waits for its connection and for the HTTP server."""

QUIET, PAGED = ("ok", "info"), ("warning", "critical")


class Step(Struct, frozen=True):
    """A load and the truth about it. A quiet step has no first cause and stage 0."""

    name: str
    workers: int
    settle_s: float
    first_cause: str | None = None
    stage_from: int = 0
    notes: bool = False
    """Whether a quiet step may have causes at info."""
    as_text: bool = False

    @property
    def expected(self) -> str:
        """The truth in a few words."""
        if self.first_cause:
            return f"exit 1, stage {self.stage_from}+, {self.first_cause}"
        return f"exit 0, stage 0, {'no warning' if self.notes else 'no cause'}"


STEPS = (
    Step("healthy", 4, 6.0),
    Step("evicting", 30, 8.0, first_cause="kv_pressure", stage_from=2),
    Step("queueing", 90, 10.0, first_cause="kv_pressure", stage_from=3, as_text=True),
    Step("recovered", 3, 4.0, notes=True),
    Step("idle", 0, 4.0, notes=True),
)


def wrong(step: Step, said: Said, seen: Seen) -> list[str]:
    """What is wrong with what was said of a step."""
    if not said.document:
        return [f"no JSON document, exit {said.status}: {said.stderr.strip()!r}"]
    health, stage = said.document["health"], said.stage
    first = said.causes[0][0] if said.causes else None
    complaints: list[str] = []
    if said.status != (1 if step.first_cause else 0):
        complaints.append(f"exit {said.status}")
    if health not in (PAGED if step.first_cause else QUIET):
        complaints.append(f"health {health}")
    if stage is None or stage < step.stage_from or (stage > 0 and not step.first_cause):
        complaints.append(f"stage {stage}")
    if step.first_cause and first != step.first_cause:
        complaints.append(f"first cause {first}")
    if not step.first_cause:
        named = [c for c, severity in said.causes if severity != "info" or not step.notes]
        complaints += [f"cause {cause}" for cause in named]
    return complaints + latencies_apart(step, said, seen)


def latencies_apart(step: Step, said: Said, seen: Seen) -> list[str]:
    """Means that are not what the client saw in the same span of time."""
    complaints: list[str] = []
    for key, client_s, near_s in (
        ("ttft_mean_s", seen.ttft_mean_s, TTFT_APART_S),
        ("itl_mean_s", seen.itl_mean_s, 0.0),
    ):
        server_s = said.signal(key)
        if client_s is None or server_s is None:
            if step.workers or client_s != server_s:
                complaints.append(f"{key} is {server_s}, the client saw {client_s}")
        elif abs(server_s - client_s) > max(APART_RATIO * client_s, near_s):
            complaints.append(f"{key} is {server_s:.4f}, the client saw {client_s:.4f}")
    return complaints


def wrong_text(step: Step, url: str, status: int, stdout: str) -> list[str]:
    """What is wrong with the report for people on a server in trouble."""
    first, second = [*stdout.splitlines(), "", ""][:2]
    complaints: list[str] = []
    if status != 1:
        complaints.append(f"text: exit {status}")
    if not first.startswith(("WARNING", "CRITICAL")):
        complaints.append(f"text: the verdict does not come first: {first!r}")
    if url not in first or step.first_cause not in first.split():
        complaints.append(f"text: not both target and {step.first_cause} beside it: {first!r}")
    if not second.startswith("KV cache: stage "):
        complaints.append(f"text: the stage does not follow: {second!r}")
    return complaints


def wrong_when_killed(status: int, stdout: str, stderr: str) -> list[str]:
    """What is wrong with what is said of a server that is gone."""
    if status == 2 and not stdout and "connection refused" in stderr:
        return []
    return [f"killed: exit {status}, not 2 with a refused connection: {stdout + stderr!r}"]
