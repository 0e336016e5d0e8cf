"""The closed loop: induce a fault, follow the recommendation, measure what it predicted. I/O edge.

Usage: python -m tests.lab.resize [NAME ...]   (after tests/lab/install.sh; KNEEWATCH_LAB_DIR)

Each fault is diagnosed twice at the same time: with everything stated, and with no settings at all,
where kneewatch reads the server's answers, process, log and config.json. Both must have the same
first lever.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.lab.command_line import ChangeError, edited
from tests.lab.compared import Row, Run, compared, lever, levers_apart, table, unread
from tests.lab.diagnosed import say
from tests.lab.drive import DEFAULT_LAB, leave
from tests.lab.faults import FAULTS, Fault
from tests.lab.load import Load
from tests.lab.server import Server, ServerError

VLLM_VERSION = "0.32.0"
WATCH_S = 25.0
LASTS_S = 110.0
"""After the last client has started."""

SETTLE_S = 8.0
"""After the last client has started: the first requests are over by then."""


def main() -> int:
    """Run the faults named, or all. Returns the exit status: 0 when what was said was right."""
    signal.signal(signal.SIGTERM, leave)
    lab = Path(os.environ.get("KNEEWATCH_LAB_DIR") or DEFAULT_LAB).expanduser()
    names = [fault.name for fault in FAULTS]
    wanted = sys.argv[1:] or [fault.name for fault in FAULTS if not fault.by_name_only]
    if unknown := sorted(set(wanted) - set(names)):
        print(f"lab: no {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    complaints: list[str] = []
    try:
        for fault in FAULTS:
            if fault.name in wanted:
                complaints += [f"{fault.name}: {c}" for c in closed_loop(fault, lab)]
    except ServerError as exc:
        print(f"lab: {exc}", file=sys.stderr)
        return 2
    for complaint in complaints:
        print(f"WRONG  {complaint}")
    print("lab: " + (f"{len(complaints)} wrong" if complaints else "all as it should be"))
    return 1 if complaints else 0


def closed_loop(fault: Fault, lab: Path) -> list[str]:
    """What is wrong with what was said of a fault and with what was predicted for its cure."""
    print(f"\n## {fault.name}\n", flush=True)
    before = measured(fault, fault.flags, lab, "before")
    causes = [cause for cause, _ in before.said.causes]
    print(f"First lever, everything stated: {lever(before.said)}")
    print(f"First lever, no settings: {lever(before.unset)}", flush=True)
    complaints = [*levers_apart(before.said, before.unset), *unread(before.unset)]
    if not before.unset.document:
        complaints = [f"with no settings: {before.unset.short}: {before.unset.stderr.strip()}"]
    if causes[:1] != [fault.cause]:
        return [
            *complaints,
            f"said {', '.join(causes) or 'no cause'}: {before.said.stderr.strip()}",
        ]
    recommendation, skipped = followed(before.said.recommendations, fault)
    for line in skipped:
        print(f"Skipped: {line}.")
    if recommendation is None:
        return [*complaints, "no recommendation that can be followed"]
    try:
        flags = edited(fault.flags, recommendation["changes"])
    except ChangeError as exc:
        return [*complaints, f"{recommendation['id']}: {exc}"]
    print(f"With `{shlex.join(fault.flags)}` the first cause is {fault.cause}.")
    print(f"Followed: {recommendation['id']}. {recommendation['summary']}")
    print(f"Restarted with `{shlex.join(flags)}`.\n", flush=True)
    after = measured(fault, flags, lab, "after")
    rows = compared(recommendation, before, after)
    print("\n".join(table(rows)), flush=True)
    left = [f"{cause} ({severity})" for cause, severity in after.said.causes]
    print(f"\nAfter it: {after.said.short}; causes: {', '.join(left) or 'none'}.", flush=True)
    return [*complaints, *wrong(fault, after, rows)]


def wrong(fault: Fault, after: Run, rows: Sequence[Row]) -> list[str]:
    """What is wrong after the change: the cause is still named, a prediction misleads."""
    complaints = [f"{row.what}: {row.verdict}" for row in rows if row.gross]
    if not after.said.document:
        return [f"no JSON document, exit {after.said.status}: {after.said.stderr.strip()}"]
    if fault.cause in [cause for cause, _ in after.said.causes]:
        complaints.append("the cause is still named")
    return complaints


def followed(
    recommendations: Sequence[Mapping[str, Any]], fault: Fault
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The first recommendation that a CPU can follow, and why those before it were not."""
    skipped: list[str] = []
    for recommendation in recommendations:
        reason = fault.skipped.get(recommendation["id"])
        if reason is None:
            return recommendation, skipped
        skipped.append(f"{recommendation['id']}, as {reason}")
    return None, skipped


def measured(fault: Fault, flags: Sequence[str], lab: Path, when: str) -> Run:
    """A server with these flags under the fault's load.

    Raises:
        ServerError: it does not come up: the flags are refused.
    """
    with Server(lab, flags) as server:
        server.wait_ready()
        launch = lab / f"{fault.name}.sh"
        launch.write_text(shlex.join(server.command) + "\n", encoding="utf-8")
        lasts_s = fault.ramp_s + LASTS_S
        loads = [Load(server.port, lasts_s=lasts_s, shape=shape) for shape, _ in fault.loads]
        for load, (_, clients) in zip(loads, fault.loads, strict=True):
            load.resize(clients, over_s=fault.ramp_s)
        starting_s = fault.ramp_s + SETTLE_S
        watched_s = WATCH_S
        if fault.from_start:
            watched_s += starting_s
        else:
            time.sleep(starting_s)
        stated = (
            *("--launch-file", str(launch), "--vllm-version", VLLM_VERSION),
            *("--log", str(server.log), "--no-server-probe"),
        )
        with ThreadPoolExecutor() as both:
            by_hand = both.submit(say, server.url, *stated, watched_s=watched_s)
            by_itself = both.submit(say, server.url, watched_s=watched_s)
            said, unset = by_hand.result(), by_itself.result()
        for name, each in (("", said), (".no_settings", unset)):
            (lab / f"{fault.name}.{when}{name}.json").write_text(each.stdout, encoding="utf-8")
        seen = loads[0].seen(from_s=said.from_s, to_s=said.to_s)
        failures = [failure for load in loads for failure in load.failures]
        if failures:
            raise ServerError(f"{fault.name}, {when}: a request failed: {failures[0]}")
        for load in loads:
            load.resize(0)
    return Run(said, unset, seen, seats(flags))


def seats(flags: Sequence[str]) -> int | None:
    """--max-num-seqs of the command line."""
    return int(flags[flags.index("--max-num-seqs") + 1]) if "--max-num-seqs" in flags else None


if __name__ == "__main__":
    sys.exit(main())
