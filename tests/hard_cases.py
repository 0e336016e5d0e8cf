"""Labelled hard cases from the simulator, judged by kneewatch: `make accuracy`'s second part.

    python -m tests.hard_cases [--seed N] [--weeks N] [--jobs N] [--only TEXT] [--verbose]

A case's server is healthy at first, then its faults begin. A cause counts as told when it is told
at warning or worse in half of the scrapes from 150 s after the beginning on, by itself or within
another. Told causes that were not planted, and do not follow from what was, are wrong.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import cpu_count
from random import Random

from kneewatch.agent.source import TargetStream
from kneewatch.collector.exposition.parser import Limits, PageParser
from kneewatch.collector.gpu_pages import GpuPage, GpuResolver
from kneewatch.collector.names.gpus import GpuBinding
from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.engine import Catalogue
from kneewatch.diagnose.gpus import GpuChoice, GpuMonitor
from kneewatch.diagnose.profile import Profile
from kneewatch.rules.model import WINDOW_S, Severity
from tests.simulator import traces
from tests.simulator.cases import BEGINS_S, LASTS_S, SETTLE_S, Case, cases
from tests.simulator.page import START_S
from tests.simulator.server import GPU_SCRAPE_S, Server, scrapes

TOLD_RATIO = 0.5
QUEUED_RATIO = 0.1
"""A queue by capacity longer than this share of the batch is one, by the simulator's books."""

JUDGED_FROM_S = BEGINS_S + SETTLE_S


@dataclass(frozen=True, slots=True)
class Judged:
    """A case and what was said of it. `shares`: of each cause the share of judged scrapes that
    told it at warning or worse; `listed`: those told by themselves. `follows`: what was as true,
    by the simulator's own books."""

    case: Case
    shares: dict[str, float]
    listed: dict[str, float]
    firsts: Counter[str]
    confidences: tuple[tuple[str, float], ...]
    early: frozenset[str]
    delay_s: float | None
    follows: frozenset[str]

    @property
    def told(self) -> frozenset[str]:
        """Causes that count as told."""
        return frozenset(c for c, share in self.shares.items() if share >= TOLD_RATIO)

    @property
    def wrong(self) -> frozenset[str]:
        """Causes told by themselves that are not there."""
        listed = {c for c, share in self.listed.items() if share >= TOLD_RATIO}
        return frozenset(listed - self.case.wanted - self.case.also - self.follows)

    @property
    def first_right(self) -> bool:
        """Whether what came first in most scrapes was planted, or nothing was."""
        first = self.firsts.most_common(1)[0][0]
        return first in self.case.wanted or (first == "-" and not self.case.wanted)

    @property
    def right(self) -> bool:
        """Whether all that is there was told and nothing else."""
        return self.case.wanted <= self.told and not self.wrong


def _all_of_node(binding: GpuBinding) -> GpuChoice:
    return GpuChoice(binding.gpus, "the target's labels")


class Watcher:
    """kneewatch beside one server: its pages and its GPUs'."""

    def __init__(self, profile: Profile, catalogue: Catalogue) -> None:
        self.stream = TargetStream("sim", profile, Limits(), catalogue)
        self._gpus = GpuMonitor(
            window_s=profile.window_s, interval_s=GPU_SCRAPE_S, choose=_all_of_node
        )
        self.stream.gpus = self._gpus
        self._parser, self._resolver = PageParser(Limits()), GpuResolver()

    def gpu_page(self, t_s: float, body: str) -> None:
        """Take a page of the exporter."""
        page = self._parser.parse(body)
        self._gpus.take(t_s, GpuPage(page, self._resolver.resolve(page.layout)))


@dataclass(slots=True)
class Books:
    """What was true while a case was judged, whatever its pages showed."""

    scrapes: int = 0
    queued: int = 0
    seated: int = 0
    preempted: float = -1.0
    preempted_since: float = 0.0

    def note(self, server: Server) -> None:
        """A scrape's truth."""
        scheduler, counts = server.engine.scheduler, server.engine.counters.counts
        by_capacity = len(scheduler.waiting) - scheduler.deferred
        self.scrapes += 1
        self.queued += by_capacity > QUEUED_RATIO * len(scheduler.running)
        self.seated += len(scheduler.running) >= server.setting.launch.max_num_seqs
        if self.preempted < 0:
            self.preempted = counts["num_preemptions_total"]
        self.preempted_since = counts["num_preemptions_total"] - self.preempted

    @property
    def follows(self) -> frozenset[str]:
        """Causes that were true, planted or not: a lasting queue, preemptions."""
        found = set[str]()
        if self.queued > self.scrapes / 2:
            found.add("queue_saturation")
            if self.seated > self.scrapes / 2:
                found.add("admission_limit")
        if self.preempted_since >= self.scrapes:
            found.add("kv_pressure")
        return frozenset(found)


def play(case: Case, seed: int, books: Books) -> Iterator[Diagnosis]:
    """All that is said of a case."""
    setting = case.setting()
    server = Server(setting, Random(f"{seed} {case.machine} {case.name}"))
    profile = Profile(targets=case.faults[0].targets)
    watcher = Watcher(profile, Catalogue.of(profile))

    def begin(begun: Server) -> None:
        for fault in case.faults:
            fault.begin(begun)

    gpu_due_s = START_S
    for entry in scrapes(server, for_s=BEGINS_S + LASTS_S, at={BEGINS_S: begin}):
        if case.gpu_page and entry.t_s >= gpu_due_s:
            gpu_due_s = entry.t_s + GPU_SCRAPE_S
            watcher.gpu_page(entry.t_s, server.exporter.page(entry.t_s - START_S))
        if entry.t_s - START_S >= JUDGED_FROM_S:
            books.note(server)
        yield from watcher.stream.replay(case.stripped(entry))


def grave(diagnosis: Diagnosis) -> list[Cause]:
    """Causes at warning or worse, first to last."""
    return [cause for cause in diagnosis.causes if cause.severity >= Severity.WARNING]


def judge(case: Case, seed: int) -> Judged:
    """What was said of a case."""
    books = Books()
    said = [(diagnosis.t_s - START_S, grave(diagnosis)) for diagnosis in play(case, seed, books)]
    late = [causes for t_s, causes in said if t_s >= JUDGED_FROM_S]
    shares, listed, firsts = Counter[str](), Counter[str](), Counter[str]()
    for causes in late:
        listed.update(cause.id for cause in causes)
        shares.update({name for cause in causes for name in (cause.id, *cause.explains)})
        firsts[causes[0].id if causes else "-"] += 1
    before = [causes for t_s, causes in said if WINDOW_S < t_s <= BEGINS_S]
    early = {cause.id for causes in before for cause in causes}
    hit_s = (
        t_s - BEGINS_S
        for t_s, causes in said
        if t_s > BEGINS_S and any(case.wanted & {cause.id, *cause.explains} for cause in causes)
    )
    return Judged(
        case,
        {name: count / len(late) for name, count in shares.items()},
        {name: count / len(late) for name, count in listed.items()},
        firsts,
        tuple((cause.id, cause.confidence) for causes in late for cause in causes),
        frozenset(early - _from_the_start(case)),
        min(hit_s, default=None),
        books.follows,
    )


def _from_the_start(case: Case) -> frozenset[str]:
    """What a case's server has from its start on."""
    return case.wanted & {"prefix_cache_off", "metrics_missing"}


def by_group(judged: Sequence[Judged]) -> str:
    """How many cases of each group were told right."""
    heads = ("right", "first right", "of", "planted told", "wrong causes")
    lines = [f"{'cases':18}" + "".join(f"{head:>14}" for head in heads)]
    groups = dict.fromkeys(one.case.group for one in judged)
    for group in groups:
        rows = [one for one in judged if one.case.group == group]
        wanted = sum(len(one.case.wanted) for one in rows)
        told = sum(len(one.case.wanted & one.told) for one in rows)
        wrong = sum(len(one.wrong) for one in rows)
        right = sum(one.right for one in rows)
        first = sum(one.first_right for one in rows)
        cells = (right, first, len(rows), f"{told} of {wanted}", wrong)
        lines.append(f"{group:18}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def by_cause(judged: Sequence[Judged]) -> str:
    """Precision and recall of each cause over cases, and how soon the first right word came."""
    wanted, told, wrong = Counter[str](), Counter[str](), Counter[str]()
    delays = defaultdict[str, list[float]](list)
    for one in judged:
        wanted.update(one.case.wanted)
        told.update(one.case.wanted & one.told)
        wrong.update(one.wrong)
        if len(one.case.wanted) == 1 and one.delay_s is not None and one.right:
            delays[next(iter(one.case.wanted))].append(one.delay_s)
    lines = [f"{'cause':24}{'precision':>10}{'recall':>8}{'planted':>9}{'wrong':>7}{'after':>8}"]
    for cause in sorted(set(wanted) | set(wrong)):
        right = told[cause]
        precision = f"{right / (right + wrong[cause]):.2f}" if right + wrong[cause] else "-"
        recall = f"{right / wanted[cause]:.2f}" if wanted[cause] else "-"
        times = sorted(delays[cause])
        after = f"{times[len(times) // 2]:.0f} s" if times else "-"
        lines.append(
            f"{cause:24}{precision:>10}{recall:>8}{wanted[cause]:>9}{wrong[cause]:>7}{after:>8}"
        )
    return "\n".join(lines)


def calibration(judged: Sequence[Judged]) -> str:
    """Of causes told with a confidence, the share that was there, over judged scrapes."""
    tens = defaultdict[int, list[tuple[bool, float]]](list)
    for one in judged:
        for cause, confidence in one.confidences:
            right = cause in one.case.wanted | one.case.also | one.follows
            tens[min(9, int(confidence * 10))].append((right, confidence))
    lines = [f"{'confidence':14}{'mean':>6}{'right':>7}{'scrapes':>9}"]
    for ten, rows in sorted(tens.items()):
        mean = sum(confidence for _, confidence in rows) / len(rows)
        share = sum(right for right, _ in rows) / len(rows)
        label = f"{ten / 10:.1f} to {ten / 10 + 0.1:.1f}"
        lines.append(f"{label:14}{mean:>6.2f}{share:>7.2f}{len(rows):>9}")
    return "\n".join(lines)


def shown(one: Judged) -> str:
    """A case in a line."""
    shares = ", ".join(f"{cause} {share:.2f}" for cause, share in sorted(one.listed.items()))
    firsts = ", ".join(f"{cause} {count}" for cause, count in one.firsts.most_common(2))
    wanted = "+".join(sorted(one.case.wanted)) or "nothing"
    early = f"  EARLY {', '.join(sorted(one.early))}" if one.early else ""
    return (
        f"{'yes' if one.right else 'NO':4}{one.case.machine:20}{one.case.name[:58]:60}"
        f"want {wanted:38} first {firsts:44} told {shares or '-'}{early}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weeks", type=float, default=traces.WEEKS, help="engine-weeks watched")
    parser.add_argument(
        "--jobs", type=int, default=cpu_count() or 1, help="processes for the weeks"
    )
    parser.add_argument("--detailed", action="store_true", help="weeks step by step: far slower")
    parser.add_argument("--only", default="", help="cases with this in group, name or machine")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    given = parser.parse_args()
    chosen = [c for c in cases() if given.only in f"{c.group} {c.name} {c.machine}"]
    judged = [judge(case, given.seed) for case in chosen]
    for one in judged:
        if given.verbose or not one.right or one.early:
            print(shown(one))
    if judged:
        early = sum(bool(one.early) for one in judged)
        print(f"\n{by_group(judged)}\n\n{by_cause(judged)}\n\n{calibration(judged)}\n")
        print(f"healthy minutes before the fault: a warning in {early} of {len(judged)} cases\n")
    if given.weeks:
        print(traces.report(given.seed, given.weeks, detailed=given.detailed, jobs=given.jobs))


if __name__ == "__main__":
    main()
