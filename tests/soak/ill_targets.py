"""Targets that are ill beside targets that are well: do the well ones keep their times?"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.store.reader import Reader
from tests.agent.daemon.running import Daemon
from tests.agent.store.factories import EVER
from tests.soak.fault_outcome import FaultOutcome
from tests.soak.process import MIB, cpu_s, peak_bytes, threads
from tests.soak.punctual import Punctual, punctual
from tests.soak.servers import servers
from tests.waiting import until

INTERVAL_S = 2.0
WARM_S = 8.0
STOP_S = 3.0
HOSTILE = {"engines": 1, "labels": 1, "blank": 1, "wide": 1, "packed": 1, "gpus": 1}


class Beside(Struct, frozen=True):
    """How healthy targets did beside ill ones, what is said of each kind of these, what the daemon
    took, and how long its end took."""

    well: Punctual
    ill: Mapping[str, str]
    peak_bytes: int
    threads: int
    cpu_ratio: float
    stopped_s: float
    log: str


@contextmanager
def both(well: int, **ill: int) -> Generator[dict[str, list[str]]]:
    """The addresses of well and ill servers. A process of their own keeps pages of the well ones
    from waiting for those of the others."""
    with servers(live=well) as live, servers(**ill) as others:
        yield live | others


def beside(
    *,
    well: int,
    for_s: float,
    interval_s: float = INTERVAL_S,
    warm_s: float = WARM_S,
    **ill: int,
) -> Beside:
    """So many ill targets of each kind beside so many that are well."""
    with tempfile.TemporaryDirectory() as name, servers(live=well, **ill) as urls:
        folder, store = Path(name), Path(name) / "kneewatch.db"
        file_sd = folder / "targets.json"
        exporter = urls.pop("gpus", ["none"])[0]
        own = ["--interval", f"{interval_s}s", "--gpu-metrics", exporter, "--file-sd", str(file_sd)]
        file_sd.write_text(json.dumps([{"targets": [u for some in urls.values() for u in some]}]))
        if ill.get("huge"):
            own += ("--limits-body-bytes", str(64 * MIB), "--limits-series", "200000")
        with Daemon(folder, *own) as daemon:
            assert daemon.url
            pid = daemon.process.pid
            pages = {url for kind in ("live", "huge") for url in urls.get(kind, ())}
            until(lambda: pages <= daemon.diagnoses().keys())
            time.sleep(warm_s)
            from_s, used_s = time.time(), cpu_s(pid)
            time.sleep(for_s)
            to_s = time.time() - interval_s
            cpu_ratio = (cpu_s(pid) - used_s) / for_s
            peak, running, said = peak_bytes(pid), threads(pid), daemon.diagnoses()
            stopped_s = daemon.end()
        well_paced = punctual(
            store,
            urls["live"],
            interval_s=interval_s,
            from_s=from_s,
            to_s=to_s,
            targets=sum(map(len, urls.values())),
        )
        words = {kind: _said(store, urls[kind], said) for kind in urls if kind != "live"}
        return Beside(well_paced, words, peak, running, cpu_ratio, stopped_s, daemon.log)


def told(what: str, outcome: Beside) -> FaultOutcome:
    """The same in words."""
    lines = (
        f"healthy targets: {outcome.well}",
        *(f"{kind}: {words}" for kind, words in outcome.ill.items()),
        f"memory {outcome.peak_bytes / MIB:.0f} MiB at most, {outcome.threads} threads, "
        f"{100 * outcome.cpu_ratio:.1f} % of one core, stopped in {outcome.stopped_s:.1f} s",
    )
    kept = outcome.well.on_time and outcome.stopped_s < STOP_S and "Traceback" not in outcome.log
    return FaultOutcome(what, lines, kept)


def _said(store: Path, names: list[str], told_of: Mapping[str, Mapping[str, object]]) -> str:
    """How scrapes of some targets ended, and what is said of them at the end."""
    ends: Counter[str] = Counter()
    with closing(Reader(store)) as reader:
        for name in names:
            scrapes = reader.scrapes(name, **EVER)
            ends["a page"] += len(scrapes.times) - len(scrapes.failed)
            ends.update(why.replace(name, "") for why in scrapes.failed.values())
    health = Counter(str(told_of[name]["health"]) for name in names if name in told_of)
    ended = "; ".join(f"{words} ({n}x)" for words, n in ends.most_common(2))
    last = ", ".join(f"{word} {n}" for word, n in health.items()) or "nothing yet"
    return f"{ended or 'no scrape has ended'}; said of them: {last}"


def half_hang() -> FaultOutcome:
    """50 targets, half of them hanging."""
    return told("50 targets, half of them hang", beside(well=25, hang=25, for_s=40.0))


def half_open() -> FaultOutcome:
    """Servers that are gone without a word, or stop in the middle of a page."""
    return told("half-open sockets", beside(well=8, vanish=8, stop=8, for_s=40.0))


def dripping() -> FaultOutcome:
    """Servers that say one byte a second."""
    return told("one byte a second", beside(well=8, drip=8, for_s=40.0))


def hostile() -> FaultOutcome:
    """Servers whose pages want all memory, CPU and disk, and an exporter of 5,000 GPUs."""
    outcome = beside(well=8, for_s=600.0, **HOSTILE)
    said = told("hostile pages", outcome)
    return replace(said, kept=said.kept and outcome.peak_bytes < 256 * MIB)


def huge() -> FaultOutcome:
    """Servers with pages of 30 MB."""
    return told("pages of 30 MB", beside(well=8, huge=2, for_s=60.0, interval_s=5.0))
