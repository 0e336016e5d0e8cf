"""kill -9 at random moments under load: what is left of the history.

    python -m tests.agent.store.kills [200]

A child writes cycles as fast as it can, one after the other, and says which it is about to put
and which is written. It is killed at a random moment, and the store is opened: every cycle that
was written must be there, none may be there in part, and at most the one that was under way may be
missing. The next child goes on with the same file, so that chunks are sealed under the kills too.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from tests.agent.store.factories import EVER, START_S, STEP_S, cause, counted, cycle, diagnosis
from tests.reports.documents import document_then

RUN_CYCLES = (1, 30)
"""A child writes so many cycles at least."""

AIM_S = 0.01
"""It is killed within this time after them: in the midst of a cycle, or some cycles later."""

SIGNALS = 60
Popen = subprocess.Popen[str]
PROGRAM = [sys.executable, "-m", "tests.agent.store.kills", "--nursery"]


class Left(Struct, frozen=True):
    """What one kill left: cycles put and found, and those missing that were said to be written."""

    put: int
    found: int
    lost: int


def numbered(at: int) -> Cycle:
    """The cycle of a number, which every part of it carries."""
    rng = random.Random(at)
    values = {"n": float(at), **{f"s{of}": rng.random() for of in range(SIGNALS)}}
    causes = [cause("kv_pressure")] if at % 20 < 10 else []
    verdict = diagnosis(START_S + STEP_S * at, values=values, stage=at // 30 % 3, causes=causes)
    return cycle(verdict, raw=counted(float(at)), config={"n": str(at // 100)})


def child(path: Path) -> None:
    """Write cycles until killed; each is put once the one before it is written."""
    store = Store.open(path, retention=Retention(), clock=lambda: START_S)
    begun = found_in(path)
    for at in range(begun, begun + 1_000_000):
        numbered_cycle = numbered(at)
        say("put", at)
        store.put(numbered_cycle)
        store.flush()
        while store.stats().queued:
            time.sleep(0)
        assert store.stats().last_error == ""
        say("written", at)


def say(word: str, number: int) -> None:
    """Write a line in one piece: two processes write to the pipe, and one may be killed between
    two pieces, which `print` makes where PYTHONUNBUFFERED is set."""
    os.write(sys.stdout.fileno(), f"{word} {number}\n".encode())


def found_in(path: Path) -> int:
    """How many cycles a store has: all numbers from 0 on, in every part of it.

    Raises:
        AssertionError: there is a gap, or parts differ.
    """
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if connection.execute("SELECT count(*) FROM engines").fetchone() == (0,):
            return 0
    from tests.agent.store.snapshots import snapshots  # here: with numpy no child is forked

    reader = Reader(path)
    (engine,) = reader.engines()
    series = reader.signals(engine.id, ["n", "s7"], **EVER)
    count = len(series.times)
    assert list(series.values["n"]) == list(range(count)), "a gap in the signals"
    assert not any(map(math.isnan, series.values["s7"]))
    assert len(reader.scrapes("a", **EVER).times) == count, "a gap in the scrapes"
    raw = snapshots(path, engine.id, **EVER)
    assert set(raw[-1].values.values()) == {count - 1.0}, "the newest counters"
    assert all(b.t_s - a.t_s <= 60.0 for a, b in pairwise(raw))
    for at in {0, count // 2, count - 1}:
        document = document_then(reader, engine.id, START_S + STEP_S * at)
        assert document is not None
        assert document["signals"]["n"] == at
        assert bool(document["causes"]) == (at % 20 < 10), "the document in force"
    (stage,) = [o for o in reader.intervals(kinds=("stage",), **EVER) if o.end_s is None]
    assert stage.id == str((count - 1) // 30 % 3), "the open interval"
    assert reader.configs(engine.id, **EVER)[-1].after == {"n": str((count - 1) // 100)}
    reader.close()
    return count


def nursery(path: Path) -> None:
    """Fork a child for each line of input: what it imports takes longer than it lives."""
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            child(path)
        say("pid", pid)
        os.waitpid(pid, 0)
        say("ended", 0)


@contextmanager
def children(path: Path) -> Generator[Popen]:
    """A nursery; whatever is alive of it ends with the pipe that it tells into."""
    with subprocess.Popen(
        [*PROGRAM, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def kill_once(running: Popen, path: Path, rng: random.Random) -> Left:
    """One child, killed."""
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write("begin\n")
    running.stdin.flush()
    numbers: dict[str, int] = {"put": -1, "written": -1}
    wanted = rng.randint(*RUN_CYCLES)
    while wanted or "pid" not in numbers:
        wanted -= _take(running.stdout.readline(), numbers) == "written" and wanted > 0
    time.sleep(rng.uniform(0.0, AIM_S))
    os.kill(numbers["pid"], signal.SIGKILL)
    while "ended" not in numbers:
        _take(running.stdout.readline(), numbers)
    last_at = found_in(path)
    return Left(numbers["put"] + 1, last_at, max(0, numbers["written"] + 1 - last_at))


def _take(line: str, numbers: dict[str, int]) -> str:
    assert line, "the child did not start"
    word, _, number = line.partition(" ")
    numbers[word] = int(number)
    return word


def kill_often(path: Path, times: int, *, seed: int = 1) -> list[Left]:
    """So many children, one after the other on one file."""
    rng = random.Random(seed)
    with children(path) as running:
        return [kill_once(running, path, rng) for _ in range(times)]


def main() -> None:
    """Kill, and print the figures."""
    if sys.argv[1:2] == ["--nursery"]:
        nursery(Path(sys.argv[2]))
        return
    times = int(sys.argv[1]) if sys.argv[1:] else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        left = kill_often(path, times)
        with closing(sqlite3.connect(path)) as connection:
            (chunks,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
    under_way = sum(kill.found < kill.put for kill in left)
    print(f"kills: {times}; the store opened and was whole after each of them")
    print(f"cycles: {left[-1].found}, chunks sealed: {chunks}")
    print(f"kills that cost the cycle under way: {under_way}")
    print(f"cycles lost that had been written: {sum(kill.lost for kill in left)}")
    if any(kill.lost or kill.put - kill.found > 1 for kill in left):
        sys.exit("more than the cycle under way was lost")


if __name__ == "__main__":
    main()
