"""Record the incidents of `tests/lab/scenarios.py` on a real vLLM, as test data. I/O edge.

Usage: python -m tests.lab.record FOLDER [NAME ...]   (after tests/lab/install.sh;
VLLM_LAB_DIR as there). FOLDER gets a compact recording per scenario, and their labels.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.diagnosed import PROGRAM
from tests.lab.drive import DEFAULT_LAB, leave
from tests.lab.load import Load, Shape
from tests.lab.scenarios import SCENARIOS, Phase, Scenario
from tests.lab.server import Server, ServerError

INTERVAL_S = 5
LASTS_S = 1800.0
STOPPED_EVERY_S = 0.06
SILENT_S = 180.0
UNREAD = re.compile(
    r"# HELP |(# TYPE )?(python_|\w+:?\w*_created[{ ]|http_request_duration_highr_"
    r"|vllm:request_(inference_time|max_num_generation|params|num_preemptions)_)"
)
"""Lines that are left out: gzip repeats what was on the last page where that is below 32 KiB."""


def main() -> int:
    """Record the scenarios named, or all. Returns the exit status."""
    signal.signal(signal.SIGTERM, leave)
    lab = Path(os.environ.get("VLLM_LAB_DIR") or DEFAULT_LAB).expanduser()
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for scenario in SCENARIOS:
            if not names or scenario.name in names:
                record(scenario, lab, folder)
    except ServerError as exc:
        print(f"lab: {exc}", file=sys.stderr)
        return 2
    return 0


def record(scenario: Scenario, lab: Path, folder: Path) -> None:
    """Play one scenario; write its recording and add its labels."""
    raw, recording = lab / f"{scenario.name}.jsonl.gz", folder / f"{scenario.name}.jsonl.gz"
    raw.unlink(missing_ok=True)
    with Server(lab, scenario.flags, scenario.config) as server:
        print(f"{scenario.name}: ready after {server.wait_ready():.0f} s", flush=True)
        shapes = dict.fromkeys(shape for each in scenario.phases for shape, _ in each.loads)
        loads = {shape: Load(server.port, lasts_s=LASTS_S, shape=shape) for shape in shapes}
        with recorded(server.url, raw):
            rows = [play(phase, server, loads) for phase in scenario.phases]
            for load in loads.values():
                load.resize(0)
        for load in loads.values():
            print(f"  {len(load.failures)} failed requests: {load.failures[:1]}", flush=True)
    compact(raw, recording, host=any(phase.busy_processes for phase in scenario.phases))
    labels = folder / "labels.json"
    by_name: dict[str, Any] = json.loads(labels.read_text()) if labels.exists() else {}
    by_name[scenario.name] = {
        "fault": scenario.fault,
        "flags": list(scenario.flags),
        "captures": [recording.name],
        "phases": rows,
    }
    labels.write_text(json.dumps(by_name, indent=1, sort_keys=True) + "\n")


def play(phase: Phase, server: Server, loads: dict[Shape, Load]) -> dict[str, object]:
    """Have a phase's load for its time. Returns its label."""
    from_s = time.time()
    print(f"  {phase.name} ({phase.state})", flush=True)
    wanted = dict(phase.loads)
    for shape, load in loads.items():
        load.resize(wanted.get(shape, 0), over_s=phase.ramp_s)
    if phase.crashes:
        server.restart(phase.flags)
        server.wait_ready()
    with neighbours(phase.busy_processes), slowed(server, phase):
        time.sleep(phase.lasts_s)
    if phase.state == "draining":
        for load in loads.values():
            load.wait_drained(SILENT_S)
    first, *others = loads.values()
    seen = first.seen(*others, from_s=from_s + phase.settle_s, to_s=time.time())
    means = {"itl_mean_s": seen.itl_mean_s, "ttft_mean_s": seen.ttft_mean_s}
    print(f"  the clients saw {means}", flush=True)
    return {
        **{name: mean and round(mean, 5) for name, mean in means.items()},
        "name": phase.name,
        "state": phase.state,
        "settle_s": phase.settle_s,
        "from_t": round(from_s, 3),
        "to_t": round(time.time(), 3),
    }


@contextmanager
def recorded(url: str, file: Path) -> Generator[None]:
    """Have `kneewatch record` write the server's pages to a file."""
    command = [str(PROGRAM), "record", url, str(file), "--interval", f"{INTERVAL_S}s"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as recorder:
        try:
            yield
        finally:
            # Not SIGINT, which a recorder that was started in the background ignores.
            recorder.terminate()


@contextmanager
def slowed(server: Server, phase: Phase) -> Generator[None]:
    """Stop the engine's processes for a share of each `STOPPED_EVERY_S`, as a phase has it."""
    if not any(phase.stopped):
        yield
        return
    processes, ended = server.engine_processes(), threading.Event()

    def stop_and_go() -> None:
        begun_s, (first, last) = time.monotonic(), phase.stopped
        while not ended.is_set():
            done = min(1.0, (time.monotonic() - begun_s) / phase.lasts_s)
            share = first + (last - first) * done
            _signal(processes, signal.SIGSTOP)
            time.sleep(share * STOPPED_EVERY_S)
            _signal(processes, signal.SIGCONT)
            time.sleep((1 - share) * STOPPED_EVERY_S)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


@contextmanager
def neighbours(count: int) -> Generator[None]:
    """Have so many processes that do nothing but take CPU time.

    Each has a session of its own, as other services have: Linux shares CPU time by session.
    """
    processes = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _burn() -> None:
    os.setsid()
    while True:
        pass


def compact(raw: Path, recording: Path, *, host: bool) -> None:
    """Copy a recording without the lines that nothing reads; the same pages give the same file.

    `host`: keep the host's signals. Without `busy_processes` they only show the other work of the
    machine, which is no part of the scenario.
    """
    with gzip.open(raw, "rt", encoding="utf-8") as pages:
        entries = [json.loads(line) for line in pages]
    for entry in entries:
        if not host:
            entry.pop("host", None)
        if "body" in entry:
            entry["body"] = "".join(_read(entry["body"].splitlines(keepends=True)))
    text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    recording.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _read(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not UNREAD.match(line)]


if __name__ == "__main__":
    sys.exit(main())
