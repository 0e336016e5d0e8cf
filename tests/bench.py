"""`make bench`: the figures of the design's table, the peers measured beside us in the same run.

Each row is printed when it is measured, the quick ones first: those of a minute, then those of the
daemon (ten minutes), then the reports.

CPU times are medians over repeats of the process's own clock; wall times are medians of whole runs.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.diagnosis_config import Profile
from tests.pages_server import pages_server
from tests.peers import vllm_doctor
from tests.recordings import CAPTURES
from tests.report_rows import report_rows
from tests.soak.growing import FRESH_PAGES, counters, raised
from tests.soak.process import cpu_s as used_cpu_s
from tests.soak.rows import daemon_rows, triage_rows

BUSY = CAPTURES / "knee_sweep.jsonl.gz"
CYCLES = 80
TURNS = 30
PROMETHEUS_INTERVAL_S = 0.1
PROMETHEUS_S = 30.0
WATCH_S = 3.0
LAUNCHER = """
import resource, subprocess, sys, time
start_s = time.monotonic()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    """Print the table."""
    print(f"{'what':44}{'kneewatch':>22}{'peer':>40}{'ratio':>8}")
    bodies = [e.body for e in CaptureReader(BUSY) if e.body is not None]
    parse_row(bodies)
    replay_row(bodies)
    diagnose_row()
    cycle_row()
    for row in chain(daemon_rows(), triage_rows()):
        show(*row)
    for what, ours, bound in report_rows():
        show(what, ours, f"at most {bound}")


def show(what: str, ours: str, peer: str, ratio: str = "") -> None:
    """One row."""
    print(f"{what:44}{ours:>22}{peer:>40}{ratio:>8}", flush=True)


def cpu_s(work: Callable[..., object], *args: object) -> float:
    """CPU seconds of this process that `work` takes."""
    start_s = time.process_time()
    work(*args)
    return time.process_time() - start_s


def parse_row(bodies: list[str]) -> None:
    """Consecutive recorded pages: our warm parser against prometheus_client's."""
    parser = PageParser()
    parser.parse(bodies[0])
    ours = statistics.median(cpu_s(parser.parse, body) for body in bodies[1:])
    cold = statistics.median(cpu_s(lambda: PageParser().parse(bodies[-1])) for _ in range(15))
    theirs = statistics.median(cpu_s(peer_parse, body) for body in bodies[-15:])
    size = f"{len(bodies[-1]) / 1000:.0f} kB"
    show(
        f"parse a recorded page, {size}, CPU",
        f"{1e3 * ours:.3f} ms",
        f"prometheus_client {1e3 * theirs:.2f} ms",
        f"{theirs / ours:.0f}x",
    )
    show("the same, first page of a target", f"{1e3 * cold:.2f} ms", "", f"{theirs / cold:.1f}x")


def peer_parse(body: str) -> int:
    """Samples that prometheus_client's parser finds."""
    return sum(len(family.samples) for family in text_string_to_metric_families(body))


def cycle_row() -> None:
    """Fetch, parse, signals, rules, causes of one target against Prometheus's scrape and append.

    Our clock is stepped by the daemon's 5 s a cycle: a window holds what it would hold there.
    """
    start_s = time.time()
    with pages_server(BUSY) as url:
        stream = TargetStream("bench", Profile(), Limits())
        with closing(Fetcher(metrics_url(url))) as fetcher:
            cycles = [cpu_s(cycle, stream, fetcher, start_s + 5 * n) for n in range(CYCLES)]
        theirs = prometheus_cycle_s(url)
    ours = statistics.median(cycles[5:])
    peer = "prometheus is not installed" if theirs is None else f"Prometheus {1e3 * theirs:.2f} ms"
    ratio = "" if theirs is None else f"{theirs / ours:.1f}x"
    show("a whole cycle of one target, CPU", f"{1e3 * ours:.2f} ms", peer, ratio)


def cycle(stream: TargetStream, fetcher: Fetcher, t_s: float) -> None:
    """One cycle: a GET and its diagnosis."""
    fetched = fetcher.get()
    stream.take(t_s, fetched.body, fetched.content_type)


def prometheus_cycle_s(url: str) -> float | None:
    """CPU seconds that a real Prometheus spends on one scrape of the page, idle CPU taken away."""
    if shutil.which("prometheus") is None:
        return None
    with prometheus(None) as pid:
        idle_s = cpu_of(pid, PROMETHEUS_S / 2) * 2
    with prometheus(url) as pid:
        busy_s = cpu_of(pid, PROMETHEUS_S)
    return (busy_s - idle_s) / (PROMETHEUS_S / PROMETHEUS_INTERVAL_S)


def cpu_of(pid: int, span_s: float) -> float:
    """CPU seconds of a process over a span of wall time."""

    start_s = used_cpu_s(pid)
    time.sleep(span_s)
    return used_cpu_s(pid) - start_s


def scrape_config(url: str) -> str:
    """A configuration that scrapes one target ten times a second."""
    target = url.removeprefix("http://").removesuffix("/metrics")
    return (
        "scrape_configs:\n"
        "  - job_name: bench\n"
        f"    scrape_interval: {1000 * PROMETHEUS_INTERVAL_S:.0f}ms\n"
        f"    scrape_timeout: {1000 * PROMETHEUS_INTERVAL_S:.0f}ms\n"
        f"    static_configs: [{{targets: ['{target}']}}]\n"
    )


@contextmanager
def prometheus(url: str | None) -> Generator[int]:
    """A Prometheus on loopback, warmed up; yields its pid."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text("global: {}\n" if url is None else scrape_config(url))
        argv = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:0", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
            try:
                time.sleep(4)
                yield process.pid
            finally:
                process.kill()


def replay_row(bodies: list[str]) -> None:
    """Pages a second of `kneewatch replay --format json`, all recordings and one long capture, and
    how much more CPU prometheus_client takes only to parse as many of such pages."""
    recordings = sorted(CAPTURES.glob("*.jsonl.gz"))
    pages = sum(1 for recording in recordings for _ in CaptureReader(recording))
    replay(f"replay {len(recordings)} recordings, {pages} pages", recordings, pages, bodies)
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "long.jsonl.gz"
        count = lengthened(BUSY, long)
        replay(f"replay one capture of {count} pages", [long], count, bodies)


def replay(what: str, captures: list[Path], pages: int, bodies: list[str]) -> None:
    """Two rows: median wall and CPU time of three runs, start-up included, and the same of
    prometheus_client, which parses `bodies` between the runs: machines are not equally fast all the
    time."""
    argv = [program(), "replay", *map(str, captures), "--format", "json", "--window", "15s"]
    walls_s, cpus_s, peers_s = list[float](), list[float](), list[float]()
    for _ in range(3):
        peers_s += [cpu_s(peer_parse, body) for body in bodies[FRESH_PAGES:]]
        wall_s, used_s = wall_and_cpu_s(argv)
        walls_s.append(wall_s / pages)
        cpus_s.append(used_s / pages)
    ours_s, used_s, peer_s = map(statistics.median, (walls_s, cpus_s, peers_s))
    parses = "prometheus_client's parsing"
    show(
        what,
        f"{1 / ours_s:.0f} pages/s",
        f"{parses} {1 / peer_s:.0f} pages/s",
        f"{peer_s / ours_s:.1f}x",
    )
    show(
        "the same, CPU a page",
        f"{1e3 * used_s:.2f} ms",
        f"{parses} {1e3 * peer_s:.2f} ms",
        f"{peer_s / used_s:.1f}x",
    )


def lengthened(recording: Path, long: Path) -> int:
    """Write a recording's loaded pages over and over, each time later; returns how many.

    Counters go on from turn to turn, as those of a server that runs for a week do: each turn's
    stand higher by what the recording adds to them.
    """
    scrapes = [(e.t_s, e.body) for e in CaptureReader(recording) if e.body is not None]
    scrapes = scrapes[FRESH_PAGES:]
    span_s = scrapes[-1][0] - scrapes[0][0] + 2
    first, last = (counters(body) for _, body in (scrapes[0], scrapes[-1]))
    gained = {series: last[series] - value for series, value in first.items()}
    with CaptureWriter(long) as out:
        for turn in range(TURNS):
            for t_s, body in scrapes:
                out.write(Entry(t_s + turn * span_s, raised(body, gained, turn), status=200))
    return TURNS * len(scrapes)


def wall_and_cpu_s(argv: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    start_s, used_s = time.monotonic(), children_cpu_s()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.monotonic() - start_s, children_cpu_s() - used_s


def children_cpu_s() -> float:
    """CPU seconds of all child processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def diagnose_row() -> None:
    """Wall time of `diagnose` beyond its watching time, and its peak memory."""
    with pages_server(BUSY) as url:
        argv = [program(), "diagnose", url, "--for", f"{WATCH_S}s", "--interval", "1s"]
        ours = [measured(argv) for _ in range(3)]
        doctor = vllm_doctor()
        theirs = [measured([str(doctor), "diagnose", url])] if doctor else []
    beyond_s = statistics.median(wall for wall, _ in ours) - WATCH_S
    peak = max(peak for _, peak in ours)
    peer = f"vllm-doctor {theirs[0][0]:.2f} s, {theirs[0][1]:.0f} MiB" if theirs else ""
    ratio = f"{theirs[0][0] / beyond_s:.1f}x" if theirs else ""
    show(
        "diagnose beyond its watching time, peak RSS",
        f"{beyond_s:.2f} s, {peak:.0f} MiB",
        peer,
        ratio,
    )


def measured(argv: list[str]) -> tuple[float, float]:
    """Wall seconds and peak MiB of a command.

    Linux counts to a process what its parent held when it was started, and this one holds pages: a
    small process in between starts the command.
    """
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *argv],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    return float(said[0]), float(said[1]) / 1024


def program() -> str:
    """The installed command."""
    return str(Path(sys.executable).parent / "kneewatch")


if __name__ == "__main__":
    main()
