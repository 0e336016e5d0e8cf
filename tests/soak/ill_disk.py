"""A history that cannot be written, or not be trusted, under a daemon that goes on."""

from __future__ import annotations

import random
import resource
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from msgspec import Struct

from tests.agent.daemon.running import Daemon
from tests.soak.fault_outcome import FaultOutcome
from tests.soak.punctual import Punctual, punctual
from tests.soak.servers import servers
from tests.waiting import until

TARGETS = 8
INTERVAL_S = 0.5
BEFORE_S = 10.0
DURING_S = 15.0
PATIENCE_S = 60.0
"""Another try comes after 30 s at most."""

FLIPPED = 2000
HEAD_BYTES = 4096
"""The first page: without it the file is no store of ours, and is not touched."""

CANNOT, AGAIN, ANEW = "store cannot write", "store recovered", "store damaged, starting a new one"


@contextmanager
def full(pid: int, store: Path) -> Generator[None]:
    """No file of the process grows beyond what the history's have now."""
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    sizes = [Path(f"{store}{suffix}").stat().st_size for suffix in ("", "-wal")]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (min(sizes), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def unchangeable(_pid: int, store: Path) -> Generator[None]:
    """Nobody may write to the history's files, not even who has them open."""
    names = [str(store), f"{store}-wal"]
    subprocess.run(["chattr", "+i", *names], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *names], check=True)


def words(daemon: Daemon, message: str) -> list[str]:
    """What the daemon has said with a message: what comes after its path."""
    lines = [line for line in daemon.log.splitlines() if message in line]
    return [message + line.partition(".db")[2].strip('"') for line in lines]


def cycles_of(store: Path, names: list[str], *, from_s: float, to_s: float) -> Punctual:
    """The cycles that the history has between two times."""
    return punctual(store, names, interval_s=INTERVAL_S, from_s=from_s, to_s=to_s)


def not_writable(
    what: str, ill: Callable[[int, Path], AbstractContextManager[None]]
) -> FaultOutcome:
    """A daemon whose history takes nothing for a while: nothing may be missing in the end."""
    with tempfile.TemporaryDirectory() as name, servers(live=TARGETS) as urls:
        folder, store = Path(name), Path(name) / "kneewatch.db"
        own = ("--interval", f"{INTERVAL_S}s", "--gpu-metrics", "none", *urls["live"])
        with Daemon(folder, *own) as daemon:
            daemon.wait_for("ready")
            from_s = time.time() + 1.0
            time.sleep(BEFORE_S)
            with ill(daemon.process.pid, store):
                time.sleep(DURING_S)
                said, answered = words(daemon, CANNOT), len(daemon.diagnoses())
            healed_s = time.monotonic()
            until(lambda: words(daemon, AGAIN), PATIENCE_S)
            after_s, to_s = time.monotonic() - healed_s, time.time() - INTERVAL_S
            daemon.end()
            traces = daemon.log.count("Traceback")
        cycles = cycles_of(store, urls["live"], from_s=from_s, to_s=to_s)
    lines = (
        f"the daemon said {len(said)} times: {said[0] if said else 'nothing'}",
        f"meanwhile the API answered for {answered} targets",
        f"written again {after_s:.0f} s after it could be; in the history then: {cycles}",
    )
    kept = bool(said) and answered == TARGETS and not cycles.missed and not traces
    return FaultOutcome(f"{what} for {DURING_S:.0f} s", lines, kept)


def disk_full() -> FaultOutcome:
    """No room."""
    return not_writable("disk full", full)


def read_only() -> FaultOutcome:
    """A file that became read-only."""
    return not_writable("history read-only", unchangeable)


def flip(store: Path, *, seed: int) -> None:
    """Other bits in some of the file's bytes, once the file holds what was written: until SQLite's
    next checkpoint it is in the log beside it."""
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    rng, size = random.Random(seed), store.stat().st_size
    with store.open("r+b") as file:
        for _ in range(FLIPPED):
            at = rng.randrange(HEAD_BYTES, size)
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ rng.randrange(1, 256)]))


class Flipped(Struct, frozen=True):
    """What two daemons logged, for how many targets the second answered, how many histories were
    put aside, and the cycles since the bytes were flipped."""

    logs: tuple[str, ...]
    answered: int
    aside: int
    cycles: Punctual


def two_lives(*, running: bool) -> Flipped:
    """Two daemons on one history, its bytes flipped under the first one or between them."""
    with tempfile.TemporaryDirectory() as name, servers(live=TARGETS) as urls:
        folder, store = Path(name), Path(name) / "kneewatch.db"
        own = ("--interval", f"{INTERVAL_S}s", "--gpu-metrics", "none", *urls["live"])
        logs: list[str] = []
        flipped_s = 0.0
        for life in (1, 2):
            with Daemon(folder, *own) as daemon:
                daemon.wait_for("ready")
                if life == 2 and not running:
                    flipped_s = time.time()
                time.sleep(BEFORE_S)
                if life == 1 and running:
                    flip(store, seed=1)
                    flipped_s = time.time()
                    time.sleep(BEFORE_S)
                answered = len(daemon.diagnoses())
                daemon.end()
                logs.append(daemon.log)
            if life == 1 and not running:
                flip(store, seed=1)
        from_s, to_s = flipped_s + INTERVAL_S, flipped_s + BEFORE_S - INTERVAL_S
        cycles = cycles_of(store, urls["live"], from_s=from_s, to_s=to_s)
        aside = sum(file.name[-1].isdigit() for file in folder.glob("*.corrupt-*"))
        return Flipped(tuple(logs), answered, aside, cycles)


def flipped(*, running: bool) -> FaultOutcome:
    """A history with bytes flipped under a running daemon, or between two."""
    lives = two_lives(running=running)
    log = "".join(lives.logs)
    said = [line.partition("msg=")[2] for line in log.splitlines() if ANEW in line]
    lines = (
        f"a daemon said {len(said)} times: {said[0] if said else 'nothing'}",
        f"files kept aside by the end of the next daemon: {lives.aside}",
        f"the API answered for {lives.answered} targets",
        f"cycles of the {BEFORE_S:.0f} s after it that the new history has: {lives.cycles}",
    )
    when = "under a running daemon" if running else "before a start"
    # A running daemon may have the damaged pages in memory; then the next start comes across them.
    kept = lives.answered == TARGETS and "Traceback" not in log and lives.aside == 1
    whole = running or not lives.cycles.missed
    return FaultOutcome(f"{FLIPPED} bytes of the history flipped {when}", lines, kept and whole)


def flipped_running() -> FaultOutcome:
    """Bytes flipped under a running daemon."""
    return flipped(running=True)


def flipped_before() -> FaultOutcome:
    """Bytes flipped before a start."""
    return flipped(running=False)
