"""`make lab`: drive a real vLLM into KV pressure and out again, and hold `diagnose` to the truth.

Usage: python -m tests.lab.drive   (after tests/lab/install.sh; VLLM_LAB_DIR as there)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.lab.diagnosed import Said, run, say
from tests.lab.load import Load, Seen
from tests.lab.server import Server, ServerError
from tests.lab.steps import STEPS, Step, wrong, wrong_text, wrong_when_killed

DEFAULT_LAB = Path("~/.cache/kneewatch-lab")
LOAD_LASTS_S = 900.0
SILENT_S = 150.0

HEADER = (
    f"{'step':11}{'workers':>7}  {'expected':31}{'said':38}"
    f"{'TTFT client':>12}{'server':>12}{'ITL client':>12}{'server':>12}  right"
)


def main() -> int:
    """Run every step. Returns the exit status: 0 when all that was said was right."""
    signal.signal(signal.SIGTERM, leave)
    lab = Path(os.environ.get("VLLM_LAB_DIR") or DEFAULT_LAB).expanduser()
    try:
        with Server(lab) as server:
            print(f"lab: vLLM on {server.url}, ready after {server.wait_ready():.0f} s", flush=True)
            complaints = drive(server, lab)
    except ServerError as exc:
        print(f"lab: {exc}", file=sys.stderr)
        return 2
    for complaint in complaints:
        print(f"WRONG  {complaint}")
    print("lab: " + (f"{len(complaints)} wrong" if complaints else "all as it should be"))
    return 1 if complaints else 0


def leave(number: int, _frame: object) -> None:
    """End by an exception, so that the server is ended on the way out."""
    sys.exit(128 + number)


def drive(server: Server, lab: Path) -> list[str]:
    """What was said wrongly, over all steps and the server's death."""
    load = Load(server.port, lasts_s=LOAD_LASTS_S)
    complaints: list[str] = []
    print(HEADER, flush=True)
    for step in STEPS:
        load.resize(step.workers)
        if not load.wait_drained(SILENT_S):
            complaints.append(
                f"{step.name}: the load does not drain: no token for {SILENT_S:.0f} s"
            )
        time.sleep(step.settle_s)
        said = say(server.url)
        (lab / f"{step.name}.json").write_text(said.stdout, encoding="utf-8")
        seen = load.seen(from_s=said.from_s, to_s=said.to_s)
        mistakes = wrong(step, said, seen)
        print(row(step, said, seen, right=not mistakes), flush=True)
        if step.as_text:
            mistakes += told_as_text(step, server.url)
        complaints += [f"{step.name}: {complaint}" for complaint in mistakes]
    complaints += [f"a request failed: {failure}" for failure in load.failures[:3]]
    return complaints + told_when_killed(server)


def told_as_text(step: Step, url: str) -> list[str]:
    """What is wrong with the report for people."""
    status, stdout, _ = run("diagnose", url, "--for", "10s")
    print(f"as text: {first_line(stdout)}", flush=True)
    return wrong_text(step, url, status, stdout)


def told_when_killed(server: Server) -> list[str]:
    """What is wrong with what is said of a server that has crashed."""
    server.kill()
    status, stdout, stderr = run("diagnose", server.url)
    print(f"killed: exit {status}, {first_line(stderr)}", flush=True)
    return wrong_when_killed(status, stdout, stderr)


def row(step: Step, said: Said, seen: Seen, *, right: bool) -> str:
    """A line of the table."""
    means_s = (
        *(seen.ttft_mean_s, said.signal("ttft_mean_s")),
        *(seen.itl_mean_s, said.signal("itl_mean_s")),
    )
    figures = "".join(f"{milliseconds(mean_s):>12}" for mean_s in means_s)
    return (
        f"{step.name:11}{step.workers:>7}  {step.expected:31}{said.short:38}{figures}  "
        f"{'yes' if right else 'NO'}"
    )


def first_line(text: str) -> str:
    """The first line, without its end."""
    return text.partition("\n")[0]


def milliseconds(value_s: float | None) -> str:
    """A duration for the table; a dash for none."""
    return "-" if value_s is None else f"{1000 * value_s:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
