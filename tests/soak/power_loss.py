"""Loss of power at any moment: what is left of the history and of the messages.

    python -m tests.soak.power_loss [1000]

A real store and a real notifier run under strace, which records each write, sync and rename. For
each cut point the files are rebuilt as a disk may have them then: what was synced, and of the rest
nothing, all, or a random part (whole writes or 512-byte sectors of them). Then the next daemon
starts: its store must open without damage and have every cycle that was reported as written, and
its notifier must deliver every message that was accepted.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import Struct, field

from kneewatch.agent.notify.alert_state import state_path
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.notify.receivers import receivers
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import Store
from tests.agent.notify.factories import settings
from tests.agent.notify.test_delivery import forwarded
from tests.agent.notify.web import Posted, Reply, Taker
from tests.agent.notify.webhooks import settle as delivered
from tests.agent.notify.webhooks import webhook
from tests.agent.store.factories import EVER, START_S, STEP_S, settle
from tests.agent.store.kills import numbered
from tests.waiting import PATIENCE_S

CYCLES, MESSAGES_EVERY = 1600, 8
CALLS = "openat,pwrite64,write,ftruncate,fsync,fdatasync,rename,unlink,unlinkat,renameat"
SECTOR_BYTES = 512


class Operation(Struct, frozen=True):
    """One change of a file, one sync, or a mark. `content` are the bytes written at `offset` (-1:
    at the end), or the new path."""

    kind: str
    path: str
    content: bytes = b""
    offset: int = -1


class Outcome(Struct):
    """What the restarts after cuts found."""

    cuts: int = 0
    damaged: int = 0
    cycles_lost: int = 0
    messages_lost: int = 0
    repeated: int = 0
    repeated_at_once: int = 0

    @property
    def kept(self) -> bool:
        """Whether nothing was lost, and at most the message under way was delivered again."""
        lost = self.damaged or self.cycles_lost or self.messages_lost
        return self.cuts > 0 and not lost and self.repeated_at_once <= 1


# --- The child, under strace ----------------------------------------------------------------------


def child(folder: Path, cycles: int) -> None:
    """Write cycles and forward alerts, and mark what is promised in a file of its own."""
    marks = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def mark(text: str) -> None:
        os.write(marks, f"{text}\n".encode())

    with running(folder, lambda number: mark(f"posted {number}")) as (store, notifier, _):
        for at in range(cycles):
            store.put(numbered(at))
            if at % MESSAGES_EVERY == 0:
                notifier.forward([forwarded(at)], START_S)
                mark(f"accepted {at}")
            settle(store)
            mark(f"written {at}")
        delivered(notifier)


@contextmanager
def running(
    folder: Path, posted: Callable[[int], object]
) -> Generator[tuple[Store, Notifier, Taker]]:
    """A store and a notifier in a folder, with a receiver that calls `posted` before it answers."""
    taker = Marking(posted)
    store = Store.open(folder / "kneewatch.db", retention=Retention(), clock=lambda: START_S)
    notifier = Notifier(
        receivers(settings(folder, webhook(taker))), state_file=state_path(store.path)
    )
    yield store, notifier, taker
    notifier.close(PATIENCE_S)
    store.close(PATIENCE_S)
    taker.close()


class Marking(Taker):
    """A receiver that reports the number of each message before it answers."""

    def __init__(self, posted: Callable[[int], object]) -> None:
        super().__init__()
        self._posted = posted

    def take(self, posted: Posted) -> Reply:
        self._posted(posted.body["events"][0]["number"])
        return super().take(posted)


# --- The record -----------------------------------------------------------------------------------


LINE = re.compile(r"\d+ +(?P<call>\w+)\((?P<rest>.*)")
RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>.*= (?P<result>-?\d+)")
DESCRIPTOR = re.compile(r"(?:AT_FDCWD|\d+)<(?P<path>[^>]*)>")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def recorded(folder: Path, cycles: int) -> list[Operation]:
    """What the child does with the files of the folder, in order. A write counts from its begin, a
    sync from its end."""
    record = folder.with_suffix(".strace")
    subprocess.run(
        ["strace", "-f", "-y", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-o", record,
         sys.executable, "-m", "tests.soak.power_loss", "--child", folder, str(cycles)],
        check=True,
    )  # fmt: skip
    operations, begun = list[Operation](), dict[str, Operation]()
    with record.open() as lines:
        for line in lines:
            pid = line.partition(" ")[0]
            resumed = RESUMED.match(line)
            if resumed:
                operation = begun.pop(pid, None)
                if operation is not None and resumed["result"] == "0":
                    operations.append(operation)
                continue
            operation = operation_of(line, folder)
            if operation is None:
                continue
            if operation.kind == "sync" and "<unfinished" in line:
                begun[pid] = operation
            elif not re.search(r"= -1 \w+ \(", line):
                operations.append(operation)
    return operations


def operation_of(line: str, folder: Path) -> Operation | None:
    """The operation of a line of strace's; None if it changes nothing here."""
    match = LINE.match(line)
    if match is None:
        return None
    call, rest = match["call"], match["rest"]
    texts = [bytes.fromhex(text.replace("\\x", "")) for text in TEXT.findall(rest)]
    at = DESCRIPTOR.match(rest)
    if call in ("rename", "renameat", "unlink", "unlinkat", "openat"):
        paths = [text.decode() for text in texts]
        if not paths or not paths[0].startswith(f"{folder}/"):
            return None
        if call == "openat":
            flags = rest.rpartition('"')[2]
            return Operation("open", paths[0]) if "O_CREAT" in flags else None
        if call.startswith("rename"):
            return Operation("rename", paths[0], paths[1].encode())
        return Operation("unlink", paths[0])
    path = bytes.fromhex(at["path"].replace("\\x", "")).decode() if at else ""
    if not path.startswith(str(folder)) or path.endswith(("-shm", ".lock")):
        return None
    if call in ("fsync", "fdatasync"):
        return Operation("sync", path)
    number = [int(part) for part in re.findall(r", (\d+)", rest.partition(">")[2])]
    if call == "ftruncate":
        return Operation("truncate", path, offset=number[0])
    return Operation("write", path, texts[0], number[1] if call == "pwrite64" else -1)


# --- The disk after a cut -------------------------------------------------------------------------


class File(Struct):
    """The bytes of a file that are surely on the disk, and the changes since."""

    durable: bytearray = field(default_factory=bytearray)
    since: list[Operation] = field(default_factory=list[Operation])

    def sync(self) -> None:
        """All changes reach the disk."""
        for operation in self.since:
            change(self.durable, operation)
        self.since.clear()

    def left(self, rng: random.Random) -> bytes:
        """What may be on the disk: of the changes since the last sync none, all, or some."""
        content = bytearray(self.durable)
        kept_ratio = rng.choice((0.0, 0.5, 0.9, 1.0))
        for operation in self.since:
            if rng.random() < kept_ratio:
                change(content, operation)
            elif kept_ratio and operation.kind == "write":
                for at in range(0, len(operation.content), SECTOR_BYTES):
                    if rng.random() < kept_ratio and operation.offset >= 0:
                        part = operation.content[at : at + SECTOR_BYTES]
                        change(content, Operation("write", "", part, operation.offset + at))
        return bytes(content)


def change(content: bytearray, operation: Operation) -> None:
    """Apply a write or a truncation."""
    if operation.kind == "truncate":
        del content[operation.offset :]
        content.extend(bytes(operation.offset - len(content)))
        return
    at = len(content) if operation.offset < 0 else operation.offset
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(operation.content)] = operation.content


class Disk:
    """The files of one folder and those below it. Names that were changed reach the disk in order,
    and surely once the folder is synced, as in a journal of a file system."""

    def __init__(self) -> None:
        self.names: dict[str, File] = {}
        self.durable: dict[str, File] = {}
        self.since: list[dict[str, File]] = []

    def run(self, operation: Operation) -> None:
        """One more operation."""
        path, kind = operation.path, operation.kind
        if kind == "sync" and path not in self.names:
            self.durable, self.since = dict(self.names), []
        elif kind == "sync":
            self.names[path].sync()
        elif kind in ("write", "truncate"):
            self.names.setdefault(path, File()).since.append(operation)
        elif kind != "open" or path not in self.names:
            file = File() if kind == "open" else self.names.pop(path, None)
            target = operation.content.decode() if kind == "rename" else path
            if file is not None and kind != "unlink":
                self.names[target] = file
            self.since.append(dict(self.names))

    def left(self, rng: random.Random) -> Mapping[str, bytes]:
        """What may be on the disk, by path."""
        names = rng.choice([self.durable, *self.since])
        return {path: file.left(rng) for path, file in names.items()}


# --- The restart ----------------------------------------------------------------------------------


def restarted(
    folder: Path, files: Mapping[str, bytes], marks: Sequence[str], outcome: Outcome
) -> None:
    """Start the next daemon's parts on these files, and compare what they have with the marks."""
    promised: dict[str, list[int]] = {"written": [], "accepted": [], "posted": []}
    for text in marks:
        word, _, number = text.partition(" ")
        promised[word].append(int(number))
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    after: list[int] = []
    with running(folder, after.append) as (store, notifier, _):
        delivered(notifier)
        outcome.damaged += len(list(folder.glob("*.corrupt-*"))) + bool(store.stats().last_error)
    with closing(sqlite3.connect(folder / "kneewatch.db")) as connection:
        outcome.damaged += connection.execute("PRAGMA integrity_check").fetchone() != ("ok",)
    with closing(Reader(folder / "kneewatch.db")) as reader:
        times = reader.scrapes("a", **EVER).times
        numbers = {round((t_s - START_S) / STEP_S) for t_s in times}
        lost = set(promised["written"]) - numbers
        outcome.cycles_lost = max(outcome.cycles_lost, len(lost))
        whole = [
            row for engine in reader.engines("a")
            for row in reader.signals(engine.id, ["n"], **EVER).values["n"]
        ]  # fmt: skip
        outcome.damaged += whole != sorted(numbers)
    outcome.cuts += 1
    missing = set(promised["accepted"]) - set(promised["posted"]) - set(after)
    again = set(promised["posted"]) & set(after)
    outcome.messages_lost += len(missing)
    outcome.repeated += len(again)
    outcome.repeated_at_once = max(outcome.repeated_at_once, len(again))


def cut_often(folder: Path, cuts: int, *, cycles: int = CYCLES, seed: int = 1) -> Outcome:
    """Record one daemon's parts, and restart them after so many losses of power."""
    lived, outcome, rng = folder / "lived", Outcome(), random.Random(seed)
    lived.mkdir()
    operations = recorded(lived, cycles)
    first = next(at for at, what in enumerate(operations) if what.path.endswith("marks"))
    points = sorted(rng.sample(range(first, len(operations)), cuts))
    disk, marks, at = Disk(), list[str](), 0
    for point in points:
        for operation in operations[at:point]:
            if operation.path.endswith("/marks"):
                marks += operation.content.decode().split("\n")[:-1]
            else:
                disk.run(operation)
        at = point
        with tempfile.TemporaryDirectory(dir=folder) as name:
            left = disk.left(rng)
            files = {str(Path(path).relative_to(lived)): content for path, content in left.items()}
            restarted(Path(name), files, marks, outcome)
    return outcome


def main() -> None:
    """Cut, print the figures."""
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
        return
    cuts = int(sys.argv[1]) if sys.argv[1:] else 1000
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        outcome = cut_often(Path(name), cuts)
    print(f"losses of power: {outcome.cuts} in {time.monotonic() - began_s:.0f} s")
    print(f"histories damaged or not whole: {outcome.damaged}")
    print(f"cycles reported as written and lost, at most: {outcome.cycles_lost}")
    print(f"accepted messages lost: {outcome.messages_lost}")
    print(
        f"messages delivered again: {outcome.repeated}, at most {outcome.repeated_at_once} at once"
    )
    if (
        outcome.damaged
        or outcome.cycles_lost
        or outcome.messages_lost
        or outcome.repeated_at_once > 1
    ):
        sys.exit("more than the running cycle was lost")


if __name__ == "__main__":
    main()
