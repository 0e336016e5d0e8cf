"""What kneewatch says of a simulated case, held against what was planted and what was true."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from kneewatch.agent.captures import PageReader
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.gpu.page import GpuPage
from kneewatch.collector.names.dcgm_fields import Gpus, resolve_gpus
from kneewatch.collector.page import Page
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.gpu import GpuChoice, GpuMonitor
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import WINDOW_S, Severity
from tests.simulator.cases import Case
from tests.simulator.harm import Ledger
from tests.simulator.page import START_S
from tests.simulator.server import GPU_SCRAPE_S, Server, scrapes
from tests.target_levels import LATENCY_CAUSES, is_missed

TOLD_RATIO = 0.5
QUEUED_RATIO = 0.1
"""A queue by capacity longer than this share of the batch is one, by the simulator's books."""

FULL_FROM = 0.95
"""Requests that wait while live ones hold so much of the KV cache wait for its blocks."""

LINGERS_S = 45.0
"""A cause about a target may stand for so long after the target is met again: it does not flap."""

GPU_ROOM = re.compile(r"GPUs? (?:has|have) room")
"""What is claimed of the GPU where a batch is said to be pinned by its seats."""


class Judged(Struct, frozen=True):
    """A case and what was said of it at a level of targets. `shares`: of each cause the share of
    judged scrapes that told it at warning or worse; `listed`: those told by themselves. `follows`:
    what was as true, by the simulator's own books; `missed`: whether a target was missed in judged
    scrapes; `unmeasured`: whether room on the GPU was claimed that nothing had measured;
    `paged`: causes that were critical in a judged or healthy scrape."""

    case: Case
    level: str
    shares: dict[str, float]
    listed: dict[str, float]
    firsts: Counter[str]
    confidences: tuple[tuple[str, float], ...]
    early: frozenset[str]
    delay_s: float | None
    follows: frozenset[str]
    missed: bool
    unmeasured: bool
    paged: frozenset[str]

    @property
    def concluded(self) -> frozenset[str]:
        """Causes that count as told."""
        return frozenset(c for c, share in self.shares.items() if share >= TOLD_RATIO)

    @property
    def wrong(self) -> frozenset[str]:
        """Causes told by themselves that are not there. That a target is missed is there."""
        listed = {c for c, share in self.listed.items() if share >= TOLD_RATIO}
        true = self.case.wanted | self.case.accepted | self.case.also | self.follows
        return frozenset(listed - true - (LATENCY_CAUSES if self.missed else frozenset()))

    @property
    def first(self) -> str:
        """What came first in most scrapes; a dash for nothing."""
        return self.firsts.most_common(1)[0][0]

    @property
    def first_right(self) -> bool:
        """Whether what came first was planted, or is as right, or nothing was planted."""
        nothing = not (self.case.wanted or self.case.accepted)
        return self.first in self.case.wanted | self.case.accepted or (
            nothing and self.first == "-"
        )

    @property
    def right(self) -> bool:
        """Whether all that is there was told and nothing else."""
        return self.case.wanted <= self.concluded and not self.wrong

    @property
    def right_and_first(self) -> bool:
        """Whether it was told right, the root cause first, and nothing that was not measured."""
        return self.right and self.first_right and not self.unmeasured

    @property
    def is_quietless(self) -> bool:
        """Whether the case has no quiet time before its faults."""
        return self.case.begins_s == 0.0 or self.case.trouble is not None

    @property
    def ok(self) -> bool:
        """Whether it counts as right: of the sweeps the first cause is asked for as well."""
        swept = self.level != "none" or self.is_quietless
        return self.right_and_first if swept else self.right


class Books(Struct):
    """What was true while a case was judged, whatever its pages showed; `ledger` has the time
    before as well."""

    scrapes: int = 0
    queued: int = 0
    seated: int = 0
    full: int = 0
    preempted: float = -1.0
    preempted_since: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)

    def note(self, server: Server) -> None:
        """A scrape's truth."""
        scheduler, counts = server.engine.scheduler, server.engine.counters.counts
        by_capacity = len(scheduler.waiting) - scheduler.deferred
        self.scrapes += 1
        is_queued = by_capacity > QUEUED_RATIO * len(scheduler.running)
        self.queued += is_queued
        self.full += is_queued and scheduler.blocks.usage_ratio >= FULL_FROM
        self.seated += len(scheduler.running) >= server.setting.launch.max_num_seqs
        if self.preempted < 0:
            self.preempted = counts["num_preemptions_total"]
        self.preempted_since = counts["num_preemptions_total"] - self.preempted

    @property
    def follows(self) -> frozenset[str]:
        """Causes that were true, planted or not: a lasting queue, preemptions."""
        causes = set[str]()
        if self.queued > self.scrapes / 2:
            causes.add("queue_saturation")
            if self.seated > self.scrapes / 2:
                causes.add("admission_limit")
        if self.full > self.scrapes / 4 or self.preempted_since >= max(1, self.scrapes):
            causes.add("kv_pressure")
        return frozenset(causes)


class Incident(Struct):
    """A case as it went: its pages, the GPUs' pages of the same moments, and the books."""

    case: Case
    pages: list[tuple[float, GpuPage | None, Page | CollectError]] = field(
        default_factory=list[tuple[float, GpuPage | None, Page | CollectError]]
    )
    books: Books = field(default_factory=Books)


def played(case: Case, seed: int) -> Incident:
    """A case's server from its start to the end of its faults."""
    server = case.server(seed)
    incident = Incident(case)
    reader, gpu_parser = PageReader(Limits()), PageParser(Limits())

    gpu_due_s = START_S
    for entry in scrapes(server, for_s=case.ends_s, at=case.events(), every_s=case.scrape_s):
        gpus = None
        if case.gpu_page and entry.t_s >= gpu_due_s:
            gpu_due_s = entry.t_s + GPU_SCRAPE_S
            page = gpu_parser.parse(server.exporter.page(entry.t_s - START_S))
            gpus = GpuPage(page, resolve_gpus(page.layout))
        incident.books.ledger.note(entry.t_s - START_S, server)
        if entry.t_s - START_S >= case.judged_from_s:
            incident.books.note(server)
        incident.pages.append((entry.t_s, gpus, reader.read(case.stripped(entry))))
    return incident


def said(incident: Incident, targets: Targets) -> Iterator[Verdict]:
    """All that is said of a case with these targets."""
    profile = Profile(targets=targets)
    stream = TargetStream("sim", profile, Limits())
    gpus = GpuMonitor(window_s=profile.window_s, interval_s=GPU_SCRAPE_S, choose=_all_of_node)
    stream.gpus = gpus.reading
    for t_s, gpu_page, page in incident.pages:
        if gpu_page is not None:
            gpus.take(t_s, gpu_page)
        yield from stream.judge(t_s, page)


def _all_of_node(gpus: Gpus) -> GpuChoice:
    return GpuChoice(gpus, "the target's labels")


def grave(diagnosis: Verdict) -> list[Cause]:
    """Causes at warning or worse, first to last."""
    return [cause for cause in diagnosis.causes if cause.severity >= Severity.WARNING]


def judge(
    incident: Incident, diagnoses: Sequence[Verdict], *, level: str, targets: Targets
) -> Judged:
    """The verdict on what was said of a case with these targets."""
    case = incident.case
    late = [d for d in diagnoses if d.t_s - START_S >= case.judged_from_s]
    shares, listed, firsts = Counter[str](), Counter[str](), Counter[str]()
    for causes in map(grave, late):
        listed.update(cause.id for cause in causes)
        shares.update({name for cause in causes for name in (cause.id, *cause.explains)})
        firsts[causes[0].id if causes else "-"] += 1
    missed = any(is_missed(d, targets) for d in late)
    return Judged(
        case,
        level,
        {name: count / len(late) for name, count in shares.items()},
        {name: count / len(late) for name, count in listed.items()},
        firsts,
        tuple((cause.id, cause.confidence) for d in late for cause in grave(d)),
        _early(case, diagnoses, targets),
        _delay_s(case, diagnoses),
        incident.books.follows,
        missed,
        not case.gpu_page and any(_claims_gpu_room(d) for d in late),
        _paged([*healthy(case, diagnoses), *late], targets),
    )


def _paged(diagnoses: Sequence[Verdict], targets: Targets) -> frozenset[str]:
    """Causes at critical; not those of a target that is missed."""
    return frozenset(
        cause.id
        for diagnosis in diagnoses
        for cause in diagnosis.causes
        if cause.severity == Severity.CRITICAL
        and not (cause.id in LATENCY_CAUSES and is_missed(diagnosis, targets))
    )


def healthy(case: Case, diagnoses: Sequence[Verdict]) -> list[Verdict]:
    """What was said before the faults began, once a window was full."""
    return [d for d in diagnoses if WINDOW_S < d.t_s - START_S <= case.begins_s]


def _early(case: Case, diagnoses: Sequence[Verdict], targets: Targets) -> frozenset[str]:
    """Causes at warning or worse before the faults, without those that were true: from the start,
    or of a target that was missed just before."""
    true = case.wanted & {"prefix_cache_off", "metrics_missing"}
    if case.trouble is not None:
        true |= {case.trouble.cause, *case.trouble.also}
    early, missed_s = set[str](), -math.inf
    for diagnosis in diagnoses:
        t_s = diagnosis.t_s - START_S
        missed_s = t_s if is_missed(diagnosis, targets) else missed_s
        excused = LATENCY_CAUSES if t_s - missed_s <= LINGERS_S else frozenset[str]()
        if WINDOW_S < t_s <= case.begins_s:
            early |= {cause.id for cause in grave(diagnosis)} - excused
    return frozenset(early - true)


def _delay_s(case: Case, diagnoses: Sequence[Verdict]) -> float | None:
    """Seconds from the faults' beginning to the first right word; None without any."""
    hits = (
        d.t_s - START_S - case.begins_s
        for d in diagnoses
        if d.t_s - START_S > case.begins_s
        and any(case.wanted & {cause.id, *cause.explains} for cause in grave(d))
    )
    return min(hits, default=None)


def _claims_gpu_room(diagnosis: Verdict) -> bool:
    texts = (text for c in diagnosis.causes for text in (c.summary, *(e.text for e in c.evidence)))
    return any(GPU_ROOM.search(text) for text in texts)
