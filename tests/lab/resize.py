"""The closed loop: induce a fault, follow the recommendation, measure what it predicted. I/O edge.

Usage: python -m tests.lab.resize [NAME ...]   (after tests/lab/install.sh; VLLM_LAB_DIR)

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
from concurrent.futures import Future, ThreadPoolExecutor
from math import nan, prod
from pathlib import Path
from typing import Any

from tests.lab.command_line import ChangeError, edited
from tests.lab.compared import Pace, Row, Run, compared, lever, levers_apart, table, unread
from tests.lab.diagnosed import Said, say
from tests.lab.drive import DEFAULT_LAB, leave
from tests.lab.faults import FAULTS, Fault
from tests.lab.load import Load, Shape
from tests.lab.server import Server, ServerError

VLLM_VERSION = "0.32.0"
WATCH_S = 25.0
LASTS_S = 110.0
"""After the last client has started."""

SETTLE_S = 8.0
"""After the last client has started: the first requests are over by then."""

AFTER_RAMP_S, AFTER_SETTLE_S = 20.0, 25.0
"""After a change only the load as it stays is measured."""

REPLICAS = "replicas"
PACE = Shape(prompt_tokens=8, output_tokens=100)  # shorter than a block: no prefix is ever hit
PACE_CLIENTS, PACE_S, PACE_WARM_S = 8, 8.0, 2.0
SILENT_S = 150.0


def main() -> int:
    """Run the faults named, or all. Returns the exit status: 0 when what was said was right."""
    signal.signal(signal.SIGTERM, leave)
    lab = Path(os.environ.get("VLLM_LAB_DIR") or DEFAULT_LAB).expanduser()
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
    changes = recommendation["changes"]
    share_ratio = prod(c["from"] / c["to"] for c in changes if c["flag"] == REPLICAS)
    try:
        flags = edited(fault.flags, [c for c in changes if c["flag"] != REPLICAS])
    except ChangeError as exc:
        return [*complaints, f"{recommendation['id']}: {exc}"]
    print(f"With `{shlex.join(fault.flags)}` the first cause is {fault.cause}.")
    print(f"Followed: {recommendation['id']}. {recommendation['summary']}")
    print(f"Restarted with `{shlex.join(flags)}`, {share_ratio:.0%} of the clients.\n", flush=True)
    after = measured(fault, flags, lab, "after", share_ratio=share_ratio)
    rows = compared(recommendation, before, after)
    print("\n".join(table(rows)), flush=True)
    print(f"\n{pace_words(before, after)}")
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


def measured(
    fault: Fault, flags: Sequence[str], lab: Path, when: str, *, share_ratio: float | None = None
) -> Run:
    """A server with these flags under the fault's load; under that share of it after a change.

    Raises:
        ServerError: it does not come up: the flags are refused.
    """
    with Server(lab, flags) as server:
        server.wait_ready()
        launch = lab / f"{fault.name}.sh"
        launch.write_text(shlex.join(server.command) + "\n", encoding="utf-8")
        token_before_s = token_s(server)
        stated = (
            *("--launch-file", str(launch), "--vllm-version", VLLM_VERSION),
            *("--log", str(server.log), "--no-server-probe"),
        )
        ramp_s = fault.ramp_s if share_ratio is None else min(fault.ramp_s, AFTER_RAMP_S)
        starting_s = ramp_s + (SETTLE_S if share_ratio is None else AFTER_SETTLE_S)
        with ThreadPoolExecutor() as both:

            def diagnosed(watched_s: float) -> list[Future[Said]]:
                return [
                    both.submit(say, server.url, *options, watched_s=watched_s)
                    for options in (stated, ())
                ]

            saying: list[Future[Said]] = []
            if share_ratio is None and fault.from_start:
                earlier_s = fault.earlier[2] if fault.earlier else 0.0
                saying = diagnosed(earlier_s + starting_s + WATCH_S)
                served_earlier(fault, server)
            loads = started(fault, server, ramp_s, share_ratio or 1.0)
            time.sleep(starting_s)
            saying = saying or diagnosed(WATCH_S)
            began_s, waited_s = time.monotonic(), server.cpu_wait_s()
            said, unset = (each.result() for each in saying)
            waited_s = server.cpu_wait_s() - waited_s
            missing = waited_s / (time.monotonic() - began_s)
        for name, each in (("", said), (".no_settings", unset)):
            (lab / f"{fault.name}.{when}{name}.json").write_text(each.stdout, encoding="utf-8")
        seen = loads[0].seen(from_s=said.from_s, to_s=said.to_s)
        for load in loads:
            ended(load, f"{fault.name}, {when}")
        pace = Pace(token_before_s, token_s(server), missing)
    return Run(said, unset, seen, seats(flags), pace, share_ratio or 1.0)


def served_earlier(fault: Fault, server: Server) -> None:
    """Run the fault's earlier load, if any, to its end."""
    if fault.earlier is None:
        return
    shape, clients, lasts_s = fault.earlier
    load = Load(server.port, lasts_s=lasts_s, shape=shape)
    load.resize(clients, over_s=lasts_s / 2)
    time.sleep(lasts_s)
    ended(load, f"{fault.name}, earlier")


def started(fault: Fault, server: Server, ramp_s: float, share_ratio: float = 1.0) -> list[Load]:
    """The fault's load, its clients started within `ramp_s`."""
    loads: list[Load] = []
    for shape, clients in fault.loads:
        load = Load(server.port, lasts_s=ramp_s + LASTS_S, shape=shape)
        load.resize(max(1, round(share_ratio * clients)), over_s=ramp_s)
        loads.append(load)
    return loads


def ended(load: Load, name: str) -> None:
    """End a load and wait for its last requests.

    Raises:
        ServerError: a request failed, or the last ones do not end.
    """
    load.resize(0)
    if not load.wait_drained(SILENT_S):
        raise ServerError(f"{name}: the load does not drain: no token for {SILENT_S:.0f} s")
    if load.failures:
        raise ServerError(f"{name}: a request failed: {load.failures[0]}")


def token_s(server: Server) -> float:
    """Seconds per token of a fixed batch: the pace of the machine."""
    load = Load(server.port, lasts_s=PACE_S, shape=PACE)
    from_s = time.time() + PACE_WARM_S
    load.resize(PACE_CLIENTS)
    time.sleep(PACE_S)
    seen = load.seen(from_s=from_s, to_s=time.time())
    ended(load, "pace")
    return nan if seen.itl_mean_s is None else seen.itl_mean_s


def pace_words(before: Run, after: Run) -> str:
    """How fast the machine itself was, from one fixed batch."""
    words = [
        f"{1000 * run.pace.before_s:.3g} and {1000 * run.pace.after_s:.3g} ms per token before and "
        f"after the {which} load, during which {run.pace.cpus_missing:.2f} CPUs were missing"
        for which, run in (("first", before), ("second", after))
        if run.pace is not None
    ]
    return f"Pace: {PACE_CLIENTS} streams alone take {'; '.join(words)}."


def seats(flags: Sequence[str]) -> int | None:
    """--max-num-seqs of the command line."""
    return int(flags[flags.index("--max-num-seqs") + 1]) if "--max-num-seqs" in flags else None


if __name__ == "__main__":
    sys.exit(main())
