"""Healthy busy days: no fault, room for every peak, and yet nothing stands still. Who pages, errs.

Load follows the hour and the day of the week, with bursts of a few minutes and noise on top;
what is asked for changes with the hour, too. Some clients hang up, servers are put to sleep at
night, new releases are deployed, traffic shifts between replicas, prompts get new templates and
batch jobs come. Every trace's own books say that it was healthy: requests in the
queue, preemptions, and how busy the GPUs were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from multiprocessing import get_context
from random import Random
from sys import stderr

from msgspec import Struct

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.simulator.cases import MACHINES
from tests.simulator.days import DAY_S, KINDS, WEEK_S, load, operations, setting_of
from tests.simulator.page import START_S
from tests.simulator.quick import QuickEngine
from tests.simulator.quick_pages import QuickPages
from tests.simulator.requests import Kind
from tests.simulator.server import Server, Setting, Shape

SCRAPE_S = 15.0
WEEKS = 0.5
"""Engine-weeks watched without --weeks."""

PART_S = DAY_S / 2
"""A trace is half a day of one server: more servers and hours of the week in the same time."""

TRUE_WARNING = "target_down", Severity.WARNING
"""A server that is started anew is down; nobody has to get up for it."""

HANG_UPS = 0.01
"""The share of clients that go away before their answer is complete."""

DRAINED_S = 300.0
"""A server gets no more requests for so long before it is put to sleep."""

WAITS_S = 10.0
"""A server that lets a request wait for longer is overloaded, by the simulator's own books."""

TOLD_EVERY = 20
"""Traces after which is said how far it is."""

APART_S = 300.0
"""A cause that was gone for so long and comes back is another page."""


class Trace(Struct, frozen=True):
    """Half a day of a server, from an hour of the week on, and what was said of it."""

    name: str
    from_s: float
    hours: float
    pages: Counter[str]
    warnings: Counter[str]
    queued_ratio: float
    preemptions: float
    longest_wait_s: float
    busy_ratio: float
    peak_kv_ratio: float


class Part(Struct, frozen=True):
    """A stretch of one server to be watched; `detailed`: step by step (engine.py)."""

    kind: str
    machine: str
    from_s: float
    seed: int
    detailed: bool = False
    lasts_s: float = PART_S


def watch(part: Part) -> Trace:
    """Half a day of one server, scraped each 15 s, judged by the real monitor."""
    setting = setting_of(dict(KINDS)[part.kind], part.machine)
    rng = Random(f"{part.seed} {part.kind} {part.machine} {part.from_s}")
    books = _Books()
    pages = _detailed if part.detailed else _quick
    paged, warned = counted(pages(setting, part, rng, books))
    return Trace(
        f"{part.kind} on {part.machine}",
        part.from_s,
        part.lasts_s / 3600,
        paged,
        warned,
        books.queued / books.scrapes,
        books.preemptions,
        books.longest_wait_s,
        books.busy_s / part.lasts_s,
        books.peak_kv_ratio,
    )


class _Books(Struct):
    scrapes: int = 0
    queued: int = 0
    preemptions: float = 0.0
    longest_wait_s: float = 0.0
    busy_s: float = 0.0
    peak_kv_ratio: float = 0.0

    def note(self, waiting: int, wait_s: float, usage_ratio: float) -> None:
        """A scrape's truth: requests in the queue, and how long the first has been there."""
        self.scrapes += 1
        self.queued += waiting > 0
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self.peak_kv_ratio = max(self.peak_kv_ratio, usage_ratio)


def _stream() -> TargetStream:
    profile = Profile()
    return TargetStream("trace", profile, Limits())


def _detailed(
    setting: Setting, part: Part, rng: Random, books: _Books
) -> Iterator[Sequence[Verdict]]:
    server, stream = Server(setting, rng), _stream()
    server.source.rate = load(server.rate_per_s, part.from_s, rng, for_s=part.lasts_s)
    for turn in range(1, round(part.lasts_s / SCRAPE_S) + 1):
        entry = server.scrape(turn * SCRAPE_S)
        waiting, blocks = server.engine.scheduler.waiting, server.engine.scheduler.blocks
        wait_s = turn * SCRAPE_S - waiting[0].arrived_s if waiting else 0.0
        books.note(len(waiting), wait_s, blocks.usage_ratio)
        yield stream.replay(entry)
    books.preemptions = server.engine.counters.counts["num_preemptions_total"]
    books.busy_s = server.steps.busy.engine_s


def _quick(setting: Setting, part: Part, rng: Random, books: _Books) -> Iterator[Sequence[Verdict]]:
    server, stream = Server(setting, rng), _stream()
    usual = load(server.rate_per_s, part.from_s, rng, for_s=part.lasts_s)
    done = operations(part.from_s, rng, for_s=part.lasts_s)
    born_s, up_s, draining, preempted = 0.0, 0.0, False, False

    def rate(process_s: float) -> float:
        now_s = born_s + process_s
        if draining or done.is_asleep(now_s + DRAINED_S):
            return 0.0
        return usual(now_s) * done.rate_ratio(now_s)

    def started() -> tuple[QuickEngine, QuickPages]:
        engine = QuickEngine(
            setting.launch, server.steps, server.source.kind, rate, rng, hang_up_ratio=HANG_UPS
        )
        return engine, QuickPages(engine, form=setting.form, started_s=START_S + born_s)

    def kinds(shapes: Mapping[Shape, float]) -> list[tuple[Kind, float]]:
        return [(shape.kind([]), share) for shape, share in shapes.items()]

    engine, pages = started()
    asked = {setting.shape: 1.0}
    for turn in range(1, round(part.lasts_s / SCRAPE_S) + 1):
        now_s = turn * SCRAPE_S
        if now_s < up_s:
            refused = CollectError("connection refused", kind="refused")
            yield stream.judge(START_S + now_s, refused)
            continue
        if up_s > born_s:
            books.busy_s, preempted = books.busy_s + engine.busy_s, preempted or engine.overfull
            born_s, draining = up_s, False
            server.steps.health.clock_ratio = 1.0 / done.step_ratio
            engine, pages = started()
            engine.ask(kinds(asked))
        if (shapes := done.shapes(setting.shape, now_s)) != asked:
            asked = shapes
            engine.ask(kinds(asked))
        engine.run(now_s - born_s)
        state = engine.scheduler
        is_empty = not state.running and not state.waiting
        engine.asleep = is_empty and done.is_asleep(now_s)
        books.note(len(state.waiting), state.longest_wait_s, state.usage_ratio)
        yield stream.judge(START_S + now_s, pages.page())
        draining = draining or (born_s == 0 and now_s >= done.deploy_s)
        if draining and is_empty:
            up_s = now_s + done.starts_in_s
    books.preemptions = float(preempted or engine.overfull)
    books.busy_s += engine.busy_s


def counted(said: Iterator[Sequence[Verdict]]) -> tuple[Counter[str], Counter[str]]:
    """Pages (critical) and warnings by cause: how often each began anew."""
    pages, warnings = Counter[str](), Counter[str]()
    seen_s: dict[tuple[str, Severity], float] = {}
    for diagnosis in chain.from_iterable(said):
        for cause in diagnosis.causes:
            for severity, counts in ((Severity.CRITICAL, pages), (Severity.WARNING, warnings)):
                if cause.severity < severity or (cause.id, severity) == TRUE_WARNING:
                    continue
                last_s = seen_s.get((cause.id, severity), -math.inf)
                counts[cause.id] += diagnosis.t_s - last_s > APART_S
                seen_s[cause.id, severity] = diagnosis.t_s
    return pages, warnings


def parts(seed: int, weeks: float, *, detailed: bool = False) -> Iterator[Part]:
    """So many engine-weeks, half a day at a time, over kinds, machines and hours in turn."""
    rng = Random(f"{seed} traces")
    machines = list(MACHINES)
    for turn in range(max(1, round(weeks * WEEK_S / PART_S))):
        kind = KINDS[turn % len(KINDS)][0]
        machine = machines[(turn + turn // len(KINDS)) % len(machines)]
        yield Part(kind, machine, rng.randrange(14) * PART_S, seed + turn, detailed)


def traces(given: Sequence[Part], *, jobs: int = 1) -> Iterator[Trace]:
    """What was said of each, by so many processes."""
    if jobs == 1:
        yield from map(watch, given)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(watch, given)


def report(seed: int, weeks: float, *, detailed: bool = False, jobs: int = 1) -> str:
    """A line for each kind, what was paged, and the rate with its bound."""
    given = list(parts(seed, weeks, detailed=detailed))
    watched_traces = list[Trace]()
    for trace in traces(given, jobs=jobs):
        watched_traces.append(trace)
        if len(watched_traces) % TOLD_EVERY == 0:
            so_far = f"{len(watched_traces)} of {len(given)} half-days watched"
            print(f"{so_far}; {_false_words(watched_traces)}", file=stderr, flush=True)
    lines = [f"{'healthy busy trace':14}{'hours':>7}{'busy':>6}{'peak KV':>9}{'queued':>8}"
             f"{'preempted':>11}  pages; warnings"]  # fmt: skip
    for kind, _ in KINDS:
        rows = [trace for trace in watched_traces if trace.name.startswith(kind)]
        if not rows:
            continue
        pages, warned = Counter[str](), Counter[str]()
        for trace in rows:
            pages.update(trace.pages)
            warned.update(trace.warnings)
        hours = sum(trace.hours for trace in rows)
        lines.append(
            f"{kind:18}{hours:>7.0f}{sum(trace.busy_ratio for trace in rows) / len(rows):>6.2f}"
            f"{max(trace.peak_kv_ratio for trace in rows):>9.2f}"
            f"{sum(trace.queued_ratio for trace in rows) / len(rows):>8.3f}"
            f"{sum(trace.preemptions for trace in rows):>11.0f}  {_told(pages)}; {_told(warned)}"
        )
    sound = _sound(watched_traces)
    lines.append(
        f"left out, for requests were preempted or waited for more than {WAITS_S:.0f} s: "
        f"{len(watched_traces) - len(sound)} of {len(watched_traces)}"
    )
    watched = max(sum(trace.hours for trace in sound), 1.0) * 3600 / WEEK_S
    for word, attribute in (("pages (critical)", "pages"), ("warnings", "warnings")):
        count = _count(sound, attribute)
        lines.append(
            f"false {word}: {count} in {watched:.2f} engine-weeks, {count / watched:.2f} a week; "
            f"at most {_most(count) / watched:.2f} a week with 95 % confidence"
        )
    return "\n".join(lines)


def _sound(watched_traces: Sequence[Trace]) -> list[Trace]:
    """Those without a burst that cache or GPUs could not take: what was told of such a one was
    true."""
    return [
        trace
        for trace in watched_traces
        if not trace.preemptions and trace.longest_wait_s <= WAITS_S
    ]


def _count(watched_traces: Sequence[Trace], attribute: str) -> int:
    return sum(sum(getattr(trace, attribute).values()) for trace in watched_traces)


def _false_words(watched_traces: Sequence[Trace]) -> str:
    sound = _sound(watched_traces)
    return f"{_count(sound, 'pages')} false pages, {_count(sound, 'warnings')} false warnings"


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{cause} {n}" for cause, n in counts.most_common() if n) or "none"


def _most(count: int) -> float:
    """The highest mean of a Poisson count that still gives so few in one of 20 cases."""
    low, high = float(count), count + 20 + 5 * math.sqrt(count + 1)
    for _ in range(60):
        mean = (low + high) / 2
        terms = (math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) if mean else 1.0
                 for k in range(count + 1))  # fmt: skip
        low, high = (mean, high) if sum(terms) > 0.05 else (low, mean)
    return high
