"""Faults of living fleets, each in a pool of its own, and how they are told.

    python -m tests.living_faults [--every SECONDS] [--seed N] [--times-size X] [FAULT ...]
    python -m tests.living_faults --drawn SEED [SEED ...]
    python -m tests.living_faults --quiet SEED [SEED ...]

prints what the fleet daemon's own code says of each, at simulated time. The second draws a fleet
for each seed: sizes, moments, scrape intervals, operations beside the faults, faults that come back
and faults that heal; the third an hour of operations, of which nothing may be told. `--read` prints
every message too.
"""

from __future__ import annotations

import math
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.agent.fleet.presence import DEFAULT_PATIENCE_S
from kneewatch.agent.notify.events import message
from kneewatch.agent.notify.message import text
from kneewatch.reports import fleet_rendering
from kneewatch.reports.diagnosis_text import Style
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.living_engine import Work
from tests.living_fleet import FOREVER_S, MIN_S, LivingFleet, Pod, Pool, addresses
from tests.living_player import PROFILE, Player, Told
from tests.living_source import played

FROM_S, TO_S = 24.0 * MIN_S, 31.0 * MIN_S
"""When faults begin and end."""

END_S = 38.0 * MIN_S
WATCHED_S = 22.0 * MIN_S


class Site(Struct, frozen=True):
    """Where and when a fault is planted: the namespace that has its pool, and its times."""

    fleet: LivingFleet
    name: str
    spans: tuple[tuple[float, float], ...] = ((FROM_S, TO_S),)

    @property
    def pool(self) -> str:
        """The name of its pool."""
        model = f"m-{self.name}"
        return model if self.fleet.labels_of is addresses else f"{self.name}/{model}"

    @property
    def from_s(self) -> float:
        """When it begins."""
        return self.spans[0][0]

    @property
    def to_s(self) -> float:
        """When it ends for the last time."""
        return self.spans[-1][1]

    def deployment(self, replicas: int, **of_pool: Any) -> Pool:  # noqa: ANN401
        """Its pool, of a Deployment."""
        return self.fleet.pool("Deployment", self.name, replicas, **of_pool)

    def stateful_set(self, replicas: int) -> Pool:
        """Its pool, of a StatefulSet."""
        return self.fleet.pool("StatefulSet", self.name, replicas)

    def ails(self, pods: Sequence[Pod], **changes: float | str) -> None:
        """Change the Work of these pods."""
        for pod in pods:
            for from_s, to_s in self.spans:
                pod.ails(from_s, to_s, **changes)

    def crashes(self, pods: Sequence[Pod]) -> None:
        """Let these pods not answer."""
        for pod in pods:
            pod.crashes = list(self.spans)


class Fault(Struct, frozen=True):
    """A fault, named as its namespace. `causes` may be said first; none: it must be quiet."""

    name: str
    causes: tuple[str, ...]
    plant: Callable[[Site], None]
    severity: Severity = Severity.WARNING
    """The least severity with which it must be said."""

    many: int = 1
    """How many faults it is, each of which is told once."""

    least: int = 1
    """The fewest replicas of a pool that can have it."""


def crash_loop(site: Site) -> None:
    """One replica dies again and again, 40 s after each start."""
    site.deployment(4).pods[0].crashes = _loop(site.from_s, site.to_s)


def _loop(from_s: float, to_s: float) -> list[tuple[float, float]]:
    return [
        (from_s + 90.0 * at, from_s + 90.0 * at + 52.0) for at in range(round(to_s - from_s) // 90)
    ]


def all_loop(site: Site) -> None:
    """All replicas die again and again, one shortly after the other."""
    pods = site.deployment(4).pods
    for at, pod in enumerate(pods):
        pod.crashes = _loop(site.from_s + 60.0 * at / len(pods), site.to_s)


def only_replica(site: Site) -> None:
    """The only replica of a pool dies once, under load."""
    pool = site.deployment(1)
    del pool.pods[1:]
    pool.pods[0].crashes = [(site.from_s, site.from_s + 50.0)]


def bad_release(site: Site) -> None:
    """Each replica dies once, under load."""
    pods = site.deployment(4).pods
    apart_s = min(45.0, (site.to_s - site.from_s) / len(pods))
    for at, pod in enumerate(pods):
        pod.crashes = [(site.from_s + apart_s * at, site.from_s + apart_s * at + 50.0)]


def hung(site: Site) -> None:
    """One engine hangs with its requests."""
    site.ails(site.stateful_set(4).pods[:1], hangs=True)


def hung_idle(site: Site) -> None:
    """One engine hangs, and its gauges show no request."""
    site.ails(site.stateful_set(4).pods[:1], hangs=True, hides=True)


def slow_replica(site: Site) -> None:
    """One replica decodes slowly; its GPU shows nothing."""
    site.ails(site.deployment(4).pods[:1], itl_s=0.06)


def disaggregated(site: Site, **changes: float) -> None:
    """Prefill and decode replicas. The changes are those of decode replicas in the fault."""
    prefill, decode = Work(role="prefill", seats=16.0), Work(role="decode", output_tokens=150.0)
    site.deployment(2, workload="prefill", work=prefill, role="prefill", per_replica_per_s=4.5)
    pool = site.deployment(3, workload="decode", work=decode, role="decode", per_replica_per_s=3.0)
    site.ails(pool.pods, **changes)


def transfer_slow(site: Site) -> None:
    """KV transfers take 25 times as long."""
    disaggregated(site, transfer_s=0.9)


BATCH = Work(backlog=300.0, arrival_per_s=0.0, seats=96.0)


def batch(site: Site) -> None:
    """Throughput only: a queue by design, and a label that says so."""
    site.deployment(2, work=BATCH, kneewatch_goal="throughput")


def batch_hung(site: Site) -> None:
    """A throughput pool in which a replica hangs."""
    site.ails(site.deployment(2, work=BATCH, kneewatch_goal="throughput").pods[:1], hangs=True)


def one_takes_all(site: Site) -> None:
    """The router sends all requests to one of twelve."""
    site.ails(site.deployment(12, per_replica_per_s=1.2).pods[1:], arrival_per_s=0.0)


def outage_after_scaling(site: Site) -> None:
    """A pool that was scaled up from zero 8 minutes ago loses all replicas."""
    up_s = site.from_s - 8 * MIN_S
    pool = site.deployment(3, at_s=up_s)
    labels = {"namespace": site.name, "deployment": site.name}
    wanted = float(len(pool.pods))
    site.fleet.state(
        "kube_deployment_spec_replicas", lambda t_s: wanted if t_s >= up_s else 0.0, **labels
    )
    for pod in pool.pods:
        pod.silent_s, pod.gone_s, pod.deleted_s = site.from_s, site.from_s + 30, site.from_s + 30
    pool.begin(site.to_s - 90, len(pool.pods))


def never_answers(site: Site) -> None:
    """A new replica never answers; the fault begins when it should serve."""
    pool = site.deployment(3)
    (stuck,) = pool.begin(site.from_s - DEFAULT_PATIENCE_S, 1, load_s=9e9)
    stuck.gone_s = stuck.deleted_s = site.to_s


def adapter_thrash(site: Site) -> None:
    """Clients ask for more adapters than there are slots."""
    site.ails(site.deployment(3, work=Work(adapters=3)).pods, adapters=12)


def prefix_lost(site: Site) -> None:
    """The hit ratio falls from 70% to 11%."""
    site.ails(site.deployment(4, per_replica_per_s=4.0).pods, hit_share=0.11)


def overload(site: Site) -> None:
    """A pool gets more requests than it can serve."""
    _overload(site, site.deployment(4, per_replica_per_s=6.0))


def _overload(site: Site, pool: Pool) -> None:
    usual = pool.demand_per_s

    def demand_per_s(t_s: float) -> float:
        return usual(t_s) * (2.0 if any(s <= t_s < e for s, e in site.spans) else 1.0)

    pool.demand_per_s = demand_per_s


def kv_pressure(site: Site) -> None:
    """Prompts become so long that the cache is full."""
    pods = site.deployment(3).pods
    site.ails(pods, prompt_tokens=40_000.0, hit_share=0.9, output_tokens=600.0)


def xid(site: Site) -> None:
    """A GPU reports XID 79 and its engine hangs."""
    site.ails(site.deployment(4).pods[:1], xid=79.0, hangs=True)


def throttled(site: Site) -> None:
    """A GPU is throttled by heat."""
    pods = site.deployment(4).pods[:1]
    site.ails(pods, clock_mhz=900.0, temperature_c=88.0, throttled=0.6)


def one_down(site: Site) -> None:
    """One replica does not answer any more."""
    site.crashes(site.deployment(4).pods[:1])


def all_down(site: Site) -> None:
    """No replica answers any more."""
    site.crashes(site.deployment(3).pods)


def failing(site: Site) -> None:
    """A third of the requests fails."""
    site.ails(site.deployment(3).pods, failed_share=0.35)


def two_at_once(site: Site) -> None:
    """One replica hangs, another decodes slowly."""
    pods = site.deployment(6).pods
    site.ails(pods[:1], hangs=True)
    site.ails(pods[1:2], clock_mhz=650.0, temperature_c=88.0)


def hung_and_down(site: Site) -> None:
    """One replica hangs, another does not answer any more."""
    pods = site.deployment(6).pods
    site.ails(pods[:1], hangs=True)
    site.crashes(pods[1:2])


def hung_in_roll(site: Site) -> None:
    """A replica hangs while the pool is rolled."""
    pool = site.stateful_set(5)
    pool.roll(site.from_s - 60.0)
    site.ails([next(pod for pod in pool.pods if pod.deleted_s > site.from_s + 60.0)], hangs=True)


def overload_in_roll(site: Site) -> None:
    """The pool is rolled while it gets more requests than it can serve."""
    pool = site.deployment(4, per_replica_per_s=6.0)
    _overload(site, pool)
    pool.roll(site.from_s + 45.0)


def failing_and_hung(site: Site) -> None:
    """A third of the requests fails, and one replica hangs."""
    pods = site.deployment(3).pods
    site.ails(pods, failed_share=0.35)
    site.ails(pods[:1], hangs=True)


# --- Pools in which nothing is wrong --------------------------------------------------------------


def rolled(site: Site) -> None:
    """A pool that is rolled."""
    site.deployment(4).roll(site.from_s)


def scaled(site: Site) -> None:
    """A pool that is scaled out by two replicas, and in again."""
    pool = site.deployment(4)
    replicas = len(pool.pods)
    pool.scale(site.from_s, replicas + 2)
    pool.scale(site.to_s, replicas)


def to_zero(site: Site) -> None:
    """A pool that is scaled to zero, and up again."""
    pool = site.deployment(2)
    replicas = len(pool.pods)
    pool.scale(site.from_s, 0)
    pool.scale(site.to_s, replicas)
    wanted = partial(_wanted, site, float(replicas))
    labels = {"namespace": site.name, "deployment": site.name}
    site.fleet.state("kube_deployment_spec_replicas", wanted, **labels)


def _wanted(site: Site, replicas: float, t_s: float) -> float:
    return 0.0 if site.from_s <= t_s < site.to_s else replicas


def mixed(site: Site) -> None:
    """A pool in which every other replica is of an older vLLM."""
    for pod in site.deployment(4).pods[::2]:
        pod.ails(-FOREVER_S, FOREVER_S, is_old=True)


def adapters(site: Site) -> None:
    """A pool with as many adapters as fit."""
    site.deployment(3, work=Work(adapters=3))


def canary(site: Site) -> None:
    """A pool that gets a replica of another Deployment, which then takes over."""
    pool = site.deployment(4)
    first = pool.workload
    pool.workload = f"{first}-next"
    pool.begin(site.from_s, 1)
    pool.workload = first
    pool.roll(site.to_s, workload=f"{first}-next")


def missed(site: Site) -> None:
    """A pool in which now and then a scrape fails, or two."""
    scrape_s = site.fleet.scrape_s
    for at, pod in enumerate(site.deployment(4).pods):
        first_s = site.from_s + 3.0 * at * scrape_s
        again_s = first_s + 5.0 * scrape_s
        pod.missed = [(first_s, first_s + scrape_s), (again_s, again_s + 2.0 * scrape_s)]


def restarted(site: Site) -> None:
    """A pool in which one of several replicas dies once."""
    site.deployment(4).pods[0].crashes = [(site.from_s, site.from_s + 50.0)]


SLOW = ("bad_node", "gpu_throttled", "slow_steps")

FAULTS: Sequence[Fault] = (
    Fault("crash-loop", ("engine_restarted",), crash_loop),
    Fault("all-loop", ("engine_restarted",), all_loop, Severity.CRITICAL),
    Fault("only-replica", ("engine_restarted",), only_replica),
    Fault("bad-release", ("engine_restarted",), bad_release),
    Fault("hung", ("engine_stalled",), hung),
    Fault("hung-idle", ("engine_stalled",), hung_idle),
    Fault("slow-replica", SLOW, slow_replica),
    Fault("transfer-slow", ("kv_transfer_slow",), transfer_slow),
    Fault("pd-healthy", (), disaggregated),
    Fault("batch", (), batch),
    Fault("batch-hung", ("engine_stalled",), batch_hung),
    Fault("one-takes-all", ("replica_imbalance", "router_fault"), one_takes_all, least=3),
    Fault("outage-after-scaling", ("target_down",), outage_after_scaling),
    Fault("never-answers", ("target_down",), never_answers),
    Fault("adapter-thrash", ("adapter_thrash",), adapter_thrash),
    Fault("prefix-lost", ("prefix_reuse_lost", "routing_dilution"), prefix_lost),
    Fault("overload", ("queue_saturation", "admission_limit"), overload),
    Fault("kv-pressure", ("kv_pressure",), kv_pressure),
    Fault("xid", ("gpu_fault",), xid),
    Fault("throttled", ("gpu_throttled", "bad_node"), throttled),
    Fault("one-down", ("target_down",), one_down),
    Fault("all-down", ("target_down",), all_down),
    Fault("failing", ("requests_failing",), failing),
    Fault("two-at-once", ("engine_stalled", *SLOW), two_at_once, many=2, least=5),
    Fault("hung-and-down", ("engine_stalled", "target_down"), hung_and_down, many=2, least=4),
    Fault("hung-in-roll", ("engine_stalled",), hung_in_roll, least=3),
    Fault("overload-in-roll", ("queue_saturation", "admission_limit"), overload_in_roll),
    Fault(
        "failing-and-hung", ("engine_stalled", "requests_failing"), failing_and_hung, many=2,
        least=3,
    ),
)  # fmt: skip

OPERATIONS: Sequence[Fault] = (
    Fault("rolled", (), rolled),
    Fault("scaled", (), scaled),
    Fault("to-zero", (), to_zero),
    Fault("canary", (), canary),
    Fault("missed", (), missed),
    Fault("restarted", (), restarted, least=4),
    Fault("mixed", (), mixed),
    Fault("adapters", (), adapters),
    Fault("pd", (), disaggregated),
    Fault("batch", (), batch),
)

AGAIN = frozenset(
    ("hung", "slow-replica", "transfer-slow", "one-takes-all", "adapter-thrash", "overload",
     "kv-pressure", "xid", "throttled", "one-down", "failing", "prefix-lost")
)  # fmt: skip
"""Faults that come back, or heal, where their times are several or short."""


# --- How they are told ----------------------------------------------------------------------------


SHORT_S = MIN_S
WITHIN_S = {15: 180.0, 30: 300.0, 60: 480.0}
"""Seconds within which a fault must be told, by the seconds between scrapes."""


class Outcome(Struct, frozen=True):
    """How one fault was told. Seconds are those since it began; infinite: never."""

    fault: Fault
    site: Site
    first: str
    first_s: float
    summary: str
    began: tuple[str, ...]
    worse: int
    ended: int
    ended_s: float
    advised: frozenset[str]
    """The ids of what was recommended to its pool."""

    @property
    def _may_be_silent(self) -> bool:
        """Whether it heals itself before anyone could act."""
        return self.site.to_s - self.site.from_s < SHORT_S

    @property
    def is_right(self) -> bool:
        """Whether the right cause was said first, or nothing where nothing is wrong."""
        if not self.first:
            return not self.fault.causes or self._may_be_silent
        return self.first in self.fault.causes and not (set(self.began) - set(self.fault.causes))

    @property
    def is_told_once(self) -> bool:
        """Whether each fault began and ended once, and did not get worse."""
        many = self.fault.many * len(self.site.spans) if self.fault.causes else 0
        is_silent = self._may_be_silent and not self.began
        return len(self.began) == self.ended == (0 if is_silent else many) and not self.worse

    @property
    def is_in_time(self) -> bool:
        """Whether it was told soon enough."""
        within_s = WITHIN_S[self.site.fleet.scrape_s]
        return self.first_s <= within_s or not self.first

    @property
    def flaws(self) -> str:
        """What was wrong in how it was told; empty for nothing."""
        buys = "replicas" in self.advised and not CAPACITY.intersection(self.fault.causes)
        flaws = {
            "WRONG": not self.is_right,
            "NOT ONCE": not self.is_told_once,
            "LATE": not self.is_in_time,
            "REPLICAS": buys,
        }
        return ", ".join(name for name, is_so in flaws.items() if is_so)


CAPACITY = frozenset(("queue_saturation", "kv_pressure", "prefix_reuse_lost", "kv_transfer_slow"))
"""Causes against which replicas may help."""


def _told_pool(told: Told) -> str:
    return told.target.removeprefix("fleet/").partition(" on ")[0]


def outcome(fault: Fault, site: Site, player: Player, told: Sequence[Told]) -> Outcome:
    """How a fault was told."""
    pool = site.pool
    own = [row for row in player.said if row.pool == pool and row.severity >= fault.severity]
    mine = [each for each in told if _told_pool(each) == pool]
    ended = [each for each in mine if each.kind == "ended"]
    return Outcome(
        fault,
        site,
        own[0].id if own else "",
        own[0].t_s - site.from_s if own else FOREVER_S,
        own[0].summary if own else "",
        tuple(each.id for each in mine if each.kind == "began"),
        sum(each.kind == "worse" for each in mine),
        len(ended),
        max((each.t_s for each in ended), default=math.nan) - site.to_s,
        frozenset(advice.id for _, advice in player.advised if advice.pool == pool),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    rows = ["| fault | first cause | after | notified | worse | resolved | |",
            "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for each in outcomes:
        after = "" if math.isinf(each.first_s) else f"{each.first_s:.0f} s"
        ended = "" if math.isnan(each.ended_s) else f", {each.ended_s:.0f} s after its end"
        rows.append(
            f"| {each.site.name} | {each.first or 'nothing'} | {after} | {', '.join(each.began)} "
            f"| {each.worse} | {each.ended}{ended} | {each.flaws} |"
        )
    return "\n".join(rows)


PAST_S = 10.0 * MIN_S
"""Until then scrapes are rare."""


def fleet_until(end_s: float, *, every_s: int, seed: int, past_s: float = PAST_S) -> LivingFleet:
    """A fleet whose life ends now."""
    epoch_s = int(time.time()) // MIN_S * MIN_S - int(end_s)
    fleet = LivingFleet(scrape_s=every_s, epoch_s=epoch_s, seed=seed)
    fleet.rare_until_s = past_s
    return fleet


# --- Fleets with faults, and drawn ones -----------------------------------------------------------


SIZES = (1, 2, 3, 3, 6, 12, 12, 40)
LARGEST = 128
AGAIN_AFTER_S = 10 * MIN_S
ENDS_AFTER_S = 12 * MIN_S
HEALS_AFTER_S = 40.0


class Scene(Struct):
    """A fleet, and what was planted in it."""

    name: str
    fleet: LivingFleet
    from_s: float = WATCHED_S
    end_s: float = END_S
    sizes: tuple[int, ...] = SIZES
    sites: list[tuple[Fault, Site]] = field(default_factory=list[tuple[Fault, Site]])
    words: list[str] = field(default_factory=list[str])

    @classmethod
    def named(
        cls, names: Sequence[str], *, every_s: int, seed: int = 0, times_size: float = 1.0
    ) -> Scene:
        """The faults of these names, all without any, where all pools are scraped that often and
        have `times_size` times the replicas that are planted."""
        scene = cls("faults", fleet_until(END_S, every_s=every_s, seed=seed))
        scene.fleet.sized = lambda planted: max(2, round(planted * times_size))
        for fault in (each for each in FAULTS if not names or each.name in names):
            site = Site(scene.fleet, fault.name)
            fault.plant(site)
            scene.sites.append((fault, site))
        return scene

    @classmethod
    def quiet(cls, seed: int) -> Scene:
        """An hour of operations."""
        random = Random(seed)
        fleet = fleet_until(75.0 * MIN_S, every_s=(15, 30, 60)[seed % 3], seed=seed)
        drawn = cls(f"quiet {seed}", fleet, 15.0 * MIN_S, 75.0 * MIN_S, SIZES[:-1])
        for calm in OPERATIONS:
            drawn._plant_calm(random, calm, random.uniform(16.0, 60.0) * MIN_S)
        gap_s = random.uniform(30.0, 50.0) * MIN_S
        fleet.gap(gap_s, gap_s + random.uniform(1.0, 8.0) * MIN_S)
        drawn.words.append(f"Prometheus away from {gap_s:.0f} s")
        return drawn

    @classmethod
    def drawn(cls, seed: int) -> Scene:
        """The fleet of a seed, with two faults."""
        random = Random(seed)
        fleet = fleet_until(
            60.0 * MIN_S, every_s=(15, 15, 30, 60)[seed % 4], seed=seed, past_s=15 * MIN_S
        )
        drawn = cls(f"drawn {seed}", fleet)
        for fault in random.sample([fault for fault in FAULTS if fault.causes], 2):
            from_s = random.uniform(23.5, 27.0) * MIN_S
            spans = [(from_s, from_s + random.uniform(6.0, 8.0) * MIN_S)]
            twist = random.random() if fault.name in AGAIN else 1.0
            if twist < 0.2:
                spans = [(from_s, from_s + HEALS_AFTER_S)]
            elif twist < 0.4:
                again_s = spans[0][1] + AGAIN_AFTER_S
                spans.append((again_s, again_s + 6.0 * MIN_S))
            name = f"{fault.name}-{seed}"
            drawn._plant(random, fault, Site(fleet, name, tuple(spans)))
            beside = random.choice((None, "roll", "scale"))
            if beside:
                drawn._beside(random, name, beside, from_s)
        for calm in random.sample(OPERATIONS, 2):
            drawn._plant_calm(random, calm, random.uniform(22.5, 28.0) * MIN_S)
        drawn.end_s = max(site.to_s for _, site in drawn.sites) + ENDS_AFTER_S
        return drawn

    def _plant_calm(self, random: Random, calm: Fault, from_s: float) -> None:
        to_s = from_s + random.uniform(5.0, 9.0) * MIN_S
        self._plant(random, calm, Site(self.fleet, calm.name, ((from_s, to_s),)))

    def _plant(self, random: Random, fault: Fault, site: Site) -> None:
        replicas = max(fault.least, random.choice(self.sizes))
        if random.random() < 0.05 and self.sizes is SIZES:
            replicas = LARGEST
        self.fleet.sized = lambda _: replicas
        fault.plant(site)
        self.sites.append((fault, site))
        spans = ", ".join(f"{start:.0f} to {end:.0f} s" for start, end in site.spans)
        self.words.append(f"{site.name} ({replicas} replicas, {spans})")

    def _beside(self, random: Random, name: str, what: str, from_s: float) -> None:
        """Let a pool of another model in the same namespace be rolled, or scaled out."""
        self.fleet.sized = lambda _: random.choice((1, 2, 3))
        pool = self.fleet.pool("Deployment", name, 2, model=f"m-{name}-beside", workload="beside")
        at_s = from_s + random.uniform(-60.0, 120.0)
        if what == "roll":
            pool.roll(at_s)
        else:
            pool.scale(at_s, len(pool.pods) + 2)
        self.words.append(f"{what} of another model in {name} at {at_s:.0f} s")

    def told(
        self, folder: Path, targets: Targets | None = None
    ) -> tuple[list[Outcome], list[Told]]:
        """How each is told where these latency targets are set, and all messages."""
        cycle_s, profile = (
            max(15, self.fleet.scrape_s),
            replace(PROFILE, targets=targets or Targets()),
        )
        # While the metrics system is away nothing can be asked.
        edges = [self.from_s, *chain.from_iterable(self.fleet.gaps), self.end_s]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        player, told = played(self.fleet, folder, spans, cycle_s=cycle_s, profile=profile)
        return [outcome(fault, site, player, told) for fault, site in self.sites], told

    def strangers(self, told: Sequence[Told]) -> list[Told]:
        """Messages about pools in which nothing was planted."""
        pools = {site.pool for _, site in self.sites}
        return [each for each in told if _told_pool(each) not in pools]


def _played(scene: Scene, folder: Path, targets: Targets, *, read: bool) -> Iterator[str]:
    """Yields how a scene is told; with `read` also each message, and the fleet when it began."""
    found, told = scene.told(folder, targets)
    planted = "; ".join(scene.words)
    yield f"\n## {scene.name}, scraped every {scene.fleet.scrape_s} s: {planted}\n"
    yield table(found)
    for each in scene.strangers(told):
        yield f"STRANGER {each.t_s:.0f} s {each.kind} {each.target} {each.id}: {each.summary}"
    for each in told if read else ():
        sent = message([each.event], receiver="", base="https://kneewatch.example")
        yield f"\n--- {each.t_s:.0f} s, {each.kind}\n{text(sent)}"
        if each.kind == "began":
            yield fleet_rendering.text(each.verdict, Style())


def main() -> None:
    """Print how faults are told."""
    parser = ArgumentParser()
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times-size", type=float, default=1.0)
    parser.add_argument("--drawn", type=int, nargs="+", default=[])
    parser.add_argument("--quiet", type=int, nargs="+", default=[])
    parser.add_argument("--slo-ttft", type=float)
    parser.add_argument("--slo-itl", type=float)
    parser.add_argument("--read", action="store_true")
    parser.add_argument("fault", nargs="*")
    args = parser.parse_args()
    scenes = chain(map(Scene.drawn, args.drawn), map(Scene.quiet, args.quiet))
    if not args.drawn and not args.quiet:
        named = Scene.named(
            args.fault, every_s=args.every, seed=args.seed, times_size=args.times_size
        )
        scenes = chain([named])
    with tempfile.TemporaryDirectory() as place:
        for scene in scenes:
            targets = Targets(ttft_p99_s=args.slo_ttft, itl_p99_s=args.slo_itl)
            for line in _played(scene, Path(place), targets, read=args.read):
                print(line, flush=True)


if __name__ == "__main__":
    main()
