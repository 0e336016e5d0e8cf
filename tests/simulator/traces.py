"""Healthy busy days: no fault, room for every peak, and yet nothing stands still. Who pages, errs.

Load follows the hour and the day of the week, with bursts of a few minutes and noise on top;
what is asked for changes with the hour, too. Every trace's own books say that it was healthy:
requests in the queue, preemptions, and how busy the GPUs were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from kneewatch.agent.source import TargetStream
from kneewatch.collector.exposition.parser import Limits
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.monitor import Catalogue
from kneewatch.diagnose.profile import Profile
from kneewatch.rules.model import Severity
from tests.simulator.cases import MACHINES
from tests.simulator.gpus import chunk_tokens, hardware
from tests.simulator.page import WITH_SPECULATION
from tests.simulator.scheduler import Launch
from tests.simulator.server import DOCUMENTS, Server, Setting, Shape

DAY_S, WEEK_S = 86_400.0, 604_800.0
SCRAPE_S = 15.0
WEEKS = 0.5
"""Engine-weeks watched without --weeks."""

PART_S = DAY_S / 2
"""A trace is half a day of one server: more servers and hours of the week in the same time."""

APART_S = 300.0
"""A cause that was gone for so long and comes back is another page."""

Change = Callable[[Setting], None]


def _plain(setting: Setting) -> None:
    setting.running = 10.0


def _documents(setting: Setting) -> None:
    setting.shape, setting.running = replace(DOCUMENTS, output=300.0), 4.0


def _drafting(setting: Setting) -> None:
    setting.launch.num_speculative_tokens, setting.draft_cost_ratio = 3, 0.05
    setting.shape, setting.form = replace(setting.shape, acceptance_ratio=0.75), WITH_SPECULATION
    setting.running = 5.0


def _adapters(setting: Setting) -> None:
    setting.launch.max_loras, setting.running = 8, 8.0
    setting.shape = replace(setting.shape, adapters=6)


def _reasoning(setting: Setting) -> None:
    # Long answers: few requests fill much of the cache.
    setting.shape = Shape(prompt=800.0, output=3000.0, output_cap=12_000, prefixes=2)
    setting.running = 16.0
    setting.launch.num_gpu_blocks = int(7.0 * 16 * setting.shape.held_tokens / 16)


KINDS: tuple[tuple[str, Change], ...] = (
    ("chat", _plain),
    ("documents", _documents),
    ("speculation", _drafting),
    ("adapters", _adapters),
    ("reasoning", _reasoning),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Half a day of a server, from an hour of the week on, and what was said of it."""

    name: str
    from_s: float
    hours: float
    pages: Counter[str]
    warnings: Counter[str]
    queued_ratio: float
    preemptions: float
    busy_ratio: float
    peak_kv_ratio: float


def busy_at(t_s: float, rng_phase: float) -> float:
    """How busy a moment of the week is, about 1 in its mean, 1.75 at its peak."""
    hour = (t_s % DAY_S) / 3600
    weekend = 0.55 if t_s % WEEK_S >= 5 * DAY_S else 1.0
    day = 1 + 0.6 * math.sin((hour - 9) / 24 * 2 * math.pi)
    swell = 1 + 0.1 * math.sin(t_s / 1700 + rng_phase)
    return weekend * day * swell


def bursts(rng: Random, for_s: float) -> list[tuple[float, float, float]]:
    """Bursts: from, to, and how much more comes; about one in half an hour."""
    made, at_s = list[tuple[float, float, float]](), 0.0
    while at_s < for_s:
        at_s += rng.expovariate(1 / 1800)
        lasts_s = rng.uniform(40, 240)
        made.append((at_s, at_s + lasts_s, rng.uniform(1.3, 1.8)))
    return made


def watch(kind: str, change: Change, machine: str, from_s: float, seed: int) -> Trace:
    """Half a day of one server, scraped each 15 s, judged by the real monitor."""
    found = hardware(*MACHINES[machine])
    setting = Setting(
        hardware=found,
        launch=Launch(num_gpu_blocks=found.blocks(), max_num_batched_tokens=chunk_tokens(found)),
    )
    change(setting)
    rng = Random(f"{seed} {kind} {machine} {from_s}")
    server = Server(setting, rng)
    usual, phase = server.rate_per_s, rng.uniform(0, 6)
    extra = bursts(rng, PART_S)

    def rate(now_s: float) -> float:
        burst = max((much for start, end, much in extra if start <= now_s < end), default=1.0)
        return usual * busy_at(from_s + now_s, phase) * burst

    server.source.rate = rate
    books = _Books()
    said = _said(server, books)
    pages, warnings = counted(said)
    counts = server.engine.counters.counts
    return Trace(
        f"{kind} on {machine}",
        from_s,
        PART_S / 3600,
        pages,
        warnings,
        books.queued / books.scrapes,
        counts["num_preemptions_total"],
        server.steps.busy.engine_s / PART_S,
        books.peak_kv_ratio,
    )


@dataclass(slots=True)
class _Books:
    scrapes: int = 0
    queued: int = 0
    peak_kv_ratio: float = 0.0


def _said(server: Server, books: _Books) -> Iterator[Diagnosis]:
    profile = Profile()
    stream = TargetStream("trace", profile, Limits(), Catalogue.of(profile))
    for turn in range(1, round(PART_S / SCRAPE_S) + 1):
        entry = server.scrape(turn * SCRAPE_S)
        scheduler = server.engine.scheduler
        books.scrapes += 1
        books.queued += len(scheduler.waiting) > 0
        books.peak_kv_ratio = max(books.peak_kv_ratio, scheduler.blocks.usage_ratio)
        yield from stream.replay(entry)


def counted(said: Iterator[Diagnosis]) -> tuple[Counter[str], Counter[str]]:
    """Pages (critical) and warnings by cause: how often each began anew."""
    pages, warnings = Counter[str](), Counter[str]()
    seen_s: dict[tuple[str, Severity], float] = {}
    for diagnosis in said:
        for cause in diagnosis.causes:
            for severity, made in ((Severity.CRITICAL, pages), (Severity.WARNING, warnings)):
                if cause.severity < severity:
                    continue
                last_s = seen_s.get((cause.id, severity), -math.inf)
                made[cause.id] += diagnosis.t_s - last_s > APART_S
                seen_s[cause.id, severity] = diagnosis.t_s
    return pages, warnings


def traces(seed: int, weeks: float) -> Iterator[Trace]:
    """So many engine-weeks, half a day at a time, over kinds, machines and hours in turn."""
    rng = Random(f"{seed} traces")
    machines = list(MACHINES)
    for turn in range(max(1, round(weeks * WEEK_S / PART_S))):
        kind, change = KINDS[turn % len(KINDS)]
        machine = machines[(turn + turn // len(KINDS)) % len(machines)]
        from_s = rng.randrange(14) * PART_S
        yield watch(kind, change, machine, from_s, seed + turn)


def report(seed: int, weeks: float) -> str:
    """A line for each kind, what was paged, and the rate with its bound."""
    made = list(traces(seed, weeks))
    lines = [f"{'healthy busy trace':14}{'hours':>7}{'busy':>6}{'peak KV':>9}{'queued':>8}"
             f"{'preempted':>11}  pages; warnings"]  # fmt: skip
    for kind, _ in KINDS:
        rows = [one for one in made if one.name.startswith(kind)]
        if not rows:
            continue
        pages, warned = Counter[str](), Counter[str]()
        for one in rows:
            pages.update(one.pages)
            warned.update(one.warnings)
        hours = sum(one.hours for one in rows)
        lines.append(
            f"{kind:18}{hours:>7.0f}{sum(one.busy_ratio for one in rows) / len(rows):>6.2f}"
            f"{max(one.peak_kv_ratio for one in rows):>9.2f}"
            f"{sum(one.queued_ratio for one in rows) / len(rows):>8.3f}"
            f"{sum(one.preemptions for one in rows):>11.0f}  {_told(pages)}; {_told(warned)}"
        )
    # A burst that the cache could not hold is no healthy trace: what was told of it was true.
    sound = [one for one in made if not one.preemptions]
    lines.append(f"left out, for requests were preempted: {len(made) - len(sound)} of {len(made)}")
    watched = max(sum(one.hours for one in sound), 1.0) * 3600 / WEEK_S
    for word, attribute in (("pages (critical)", "pages"), ("warnings", "warnings")):
        count = sum(sum(getattr(one, attribute).values()) for one in sound)
        lines.append(
            f"false {word}: {count} in {watched:.2f} engine-weeks, {count / watched:.2f} a week; "
            f"at most {_most(count) / watched:.2f} a week with 95 % confidence"
        )
    return "\n".join(lines)


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
