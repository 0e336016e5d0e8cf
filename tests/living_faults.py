"""Faults of living fleets, each in a pool of its own, and how they are told.

    python -m tests.living_faults [--every SECONDS] [--seed N] [--times-size X] [FAULT ...]

prints what the fleet daemon's own code says of each, at simulated time.
"""

from __future__ import annotations

import math
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.fleet.presence import DEFAULT_PATIENCE_S
from kneewatch.rules.rule import Severity
from tests.living_engine import Work
from tests.living_fleet import FOREVER_S, MIN_S, LivingFleet
from tests.living_player import Said, Told
from tests.living_source import played

FROM_S, TO_S = 24.0 * MIN_S, 31.0 * MIN_S
"""When faults begin and end."""

END_S = 38.0 * MIN_S
WATCHED_S = 22.0 * MIN_S


class Fault(Struct, frozen=True):
    """A fault, named as its namespace. `causes` may be said first; none: it must be quiet."""

    name: str
    causes: tuple[str, ...]
    plant: Callable[[LivingFleet, str], None]
    severity: Severity = Severity.WARNING
    """The least severity with which it must be said."""

    many: int = 1
    """How many faults it is, each of which is told once."""


def crash_loop(fleet: LivingFleet, name: str) -> None:
    """One replica dies again and again, 40 s after each start."""
    pool = fleet.pool("Deployment", name, 4)
    pool.pods[0].crashes = _loop(FROM_S, TO_S)


def _loop(from_s: float, to_s: float) -> list[tuple[float, float]]:
    return [
        (from_s + 90.0 * at, from_s + 90.0 * at + 52.0) for at in range(round(to_s - from_s) // 90)
    ]


def all_loop(fleet: LivingFleet, name: str) -> None:
    """All replicas die again and again, one shortly after the other."""
    pods = fleet.pool("Deployment", name, 4).pods
    for at, pod in enumerate(pods):
        pod.crashes = _loop(FROM_S + 60.0 * at / len(pods), TO_S)


def only_replica(fleet: LivingFleet, name: str) -> None:
    """The only replica of a pool dies once, under load."""
    pool = fleet.pool("Deployment", name, 1)
    del pool.pods[1:]
    pool.pods[0].crashes = [(FROM_S, FROM_S + 50.0)]


def bad_release(fleet: LivingFleet, name: str) -> None:
    """Each replica dies once, under load."""
    pool = fleet.pool("Deployment", name, 4)
    apart_s = min(45.0, (TO_S - FROM_S) / len(pool.pods))
    for at, pod in enumerate(pool.pods):
        pod.crashes = [(FROM_S + apart_s * at, FROM_S + apart_s * at + 50.0)]


def hung(fleet: LivingFleet, name: str) -> None:
    """One engine hangs with its requests."""
    fleet.pool("StatefulSet", name, 4).pods[0].ails(FROM_S, TO_S, hangs=True)


def hung_idle(fleet: LivingFleet, name: str) -> None:
    """One engine hangs, and its gauges show no request."""
    fleet.pool("StatefulSet", name, 4).pods[0].ails(FROM_S, TO_S, hangs=True, hides=True)


def slow_replica(fleet: LivingFleet, name: str) -> None:
    """One replica decodes slowly; its GPU shows nothing."""
    fleet.pool("Deployment", name, 4).pods[0].ails(FROM_S, TO_S, itl_s=0.06)


def disaggregated(fleet: LivingFleet, name: str, **changes: float) -> None:
    """Prefill and decode replicas. The changes are those of decode replicas in the fault."""
    prefill, decode = Work(role="prefill", seats=16.0), Work(role="decode", output_tokens=150.0)
    fleet.pool("Deployment", name, 2, workload="prefill", work=prefill, role="prefill",
               per_replica_per_s=4.5)  # fmt: skip
    pool = fleet.pool("Deployment", name, 3, workload="decode", work=decode, role="decode",
                      per_replica_per_s=3.0)  # fmt: skip
    if changes:
        pool.overload(FROM_S, TO_S, **changes)


def transfer_slow(fleet: LivingFleet, name: str) -> None:
    """KV transfers take 25 times as long."""
    disaggregated(fleet, name, transfer_s=0.9)


def batch(fleet: LivingFleet, name: str) -> None:
    """Throughput only: a queue by design, and a label that says so."""
    work = Work(backlog=300.0, arrival_per_s=0.0, seats=96.0)
    fleet.pool("Deployment", name, 2, work=work, kneewatch_goal="throughput")


def batch_hung(fleet: LivingFleet, name: str) -> None:
    """A throughput pool in which a replica hangs."""
    work = Work(backlog=300.0, arrival_per_s=0.0, seats=96.0)
    pool = fleet.pool("Deployment", name, 2, work=work, kneewatch_goal="throughput")
    pool.pods[0].ails(FROM_S, TO_S, hangs=True)


def one_takes_all(fleet: LivingFleet, name: str) -> None:
    """The router sends all requests to one of twelve."""
    pool = fleet.pool("Deployment", name, 12, per_replica_per_s=1.2)
    for pod in pool.pods[1:]:
        pod.ails(FROM_S, TO_S, arrival_per_s=0.0)


def outage_after_scaling(fleet: LivingFleet, name: str) -> None:
    """A pool that was scaled up from zero 8 minutes ago loses all replicas."""
    pool = fleet.pool("Deployment", name, 3, at_s=FROM_S - 8 * MIN_S)
    up_s = FROM_S - 8 * MIN_S
    labels = {"namespace": name, "deployment": name}
    fleet.state("kube_deployment_spec_replicas", lambda t_s: 3.0 if t_s >= up_s else 0.0, **labels)
    for pod in pool.pods:
        pod.silent_s, pod.gone_s, pod.deleted_s = FROM_S, FROM_S + 30, FROM_S + 30
    pool.begin(TO_S - 90, 3)


def never_answers(fleet: LivingFleet, name: str) -> None:
    """A new replica never answers; the fault begins when it should serve."""
    pool = fleet.pool("Deployment", name, 3)
    (stuck,) = pool.begin(FROM_S - DEFAULT_PATIENCE_S, 1, load_s=9e9)
    stuck.gone_s = stuck.deleted_s = TO_S


def adapter_thrash(fleet: LivingFleet, name: str) -> None:
    """Clients ask for more adapters than there are slots."""
    pool = fleet.pool("Deployment", name, 3, work=Work(adapters=3))
    pool.overload(FROM_S, TO_S, adapters=12)


def prefix_lost(fleet: LivingFleet, name: str) -> None:
    """The hit ratio falls from 70% to 11%."""
    pool = fleet.pool("Deployment", name, 4, per_replica_per_s=4.0)
    pool.overload(FROM_S, TO_S, hit_share=0.11)


def overload(fleet: LivingFleet, name: str) -> None:
    """A pool gets more requests than it can serve."""
    pool = fleet.pool("Deployment", name, 4, per_replica_per_s=6.0)
    usual = pool.demand_per_s
    pool.demand_per_s = lambda t_s: usual(t_s) * (2.0 if FROM_S <= t_s < TO_S else 1.0)


def kv_pressure(fleet: LivingFleet, name: str) -> None:
    """Prompts become so long that the cache is full."""
    fleet.pool("Deployment", name, 3).overload(
        FROM_S, TO_S, prompt_tokens=40_000.0, hit_share=0.9, output_tokens=600.0
    )


def xid(fleet: LivingFleet, name: str) -> None:
    """A GPU reports XID 79 and its engine hangs."""
    fleet.pool("Deployment", name, 4).pods[0].ails(FROM_S, TO_S, xid=79.0, hangs=True)


def throttled(fleet: LivingFleet, name: str) -> None:
    """A GPU is throttled by heat."""
    fleet.pool("Deployment", name, 4).pods[0].ails(
        FROM_S, TO_S, clock_mhz=900.0, temperature_c=88.0, throttled=0.6
    )


def one_down(fleet: LivingFleet, name: str) -> None:
    """One replica does not answer any more."""
    fleet.pool("Deployment", name, 4).pods[0].crashes = [(FROM_S, TO_S)]


def all_down(fleet: LivingFleet, name: str) -> None:
    """No replica answers any more."""
    for pod in fleet.pool("Deployment", name, 3).pods:
        pod.crashes = [(FROM_S, TO_S)]


def failing(fleet: LivingFleet, name: str) -> None:
    """A third of the requests fails."""
    fleet.pool("Deployment", name, 3).overload(FROM_S, TO_S, failed_share=0.35)


def two_at_once(fleet: LivingFleet, name: str) -> None:
    """One replica hangs, another decodes slowly."""
    pool = fleet.pool("Deployment", name, 6)
    pool.pods[0].ails(FROM_S, TO_S, hangs=True)
    pool.pods[1].ails(FROM_S, TO_S, clock_mhz=650.0, temperature_c=88.0)


def hung_and_down(fleet: LivingFleet, name: str) -> None:
    """One replica hangs, another does not answer any more."""
    pool = fleet.pool("Deployment", name, 6)
    pool.pods[0].ails(FROM_S, TO_S, hangs=True)
    pool.pods[1].crashes = [(FROM_S, TO_S)]


def hung_in_roll(fleet: LivingFleet, name: str) -> None:
    """A replica hangs while the pool is rolled."""
    pool = fleet.pool("StatefulSet", name, 5)
    pool.roll(FROM_S - 60.0)
    next(pod for pod in pool.pods if pod.deleted_s > FROM_S + 60.0).ails(FROM_S, TO_S, hangs=True)


def overload_in_roll(fleet: LivingFleet, name: str) -> None:
    """The pool is rolled while it gets more requests than it can serve."""
    overload(fleet, name)
    fleet.pools[-1].roll(FROM_S + 45.0)


def failing_and_hung(fleet: LivingFleet, name: str) -> None:
    """A third of the requests fails, and one replica hangs."""
    failing(fleet, name)
    fleet.pools[-1].pods[0].ails(FROM_S, TO_S, hangs=True)


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
    Fault("one-takes-all", ("replica_imbalance", "router_fault"), one_takes_all),
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
    Fault("two-at-once", ("engine_stalled", *SLOW), two_at_once, many=2),
    Fault("hung-and-down", ("engine_stalled", "target_down"), hung_and_down, many=2),
    Fault("hung-in-roll", ("engine_stalled",), hung_in_roll),
    Fault("overload-in-roll", ("queue_saturation", "admission_limit"), overload_in_roll),
    Fault("failing-and-hung", ("engine_stalled", "requests_failing"), failing_and_hung, many=2),
)


class Outcome(Struct, frozen=True):
    """How one fault was told. Seconds are those since it began; infinite: never."""

    fault: Fault
    first: str
    first_s: float
    summary: str
    began: tuple[str, ...]
    worse: int
    ended: int
    ended_s: float

    @property
    def is_right(self) -> bool:
        """Whether the right cause was said first, or nothing where nothing is wrong."""
        if not self.fault.causes:
            return not self.first
        return self.first in self.fault.causes and not (set(self.began) - set(self.fault.causes))

    @property
    def is_told_once(self) -> bool:
        """Whether each fault began and ended once, and did not get worse."""
        many = self.fault.many if self.fault.causes else 0
        return len(self.began) == self.ended == many and not self.worse


def outcome(fault: Fault, said: Sequence[Said], told: Sequence[Told]) -> Outcome:
    """How a fault was told."""
    own = [
        row
        for row in said
        if row.pool.split("/")[0] == fault.name and row.severity >= fault.severity
    ]
    mine = [message for message in told if message.target.split("/")[1:2] == [fault.name]]
    ended = [message for message in mine if message.kind == "ended"]
    return Outcome(
        fault,
        own[0].id if own else "",
        own[0].t_s - FROM_S if own else FOREVER_S,
        own[0].summary if own else "",
        tuple(message.id for message in mine if message.kind == "began"),
        sum(message.kind == "worse" for message in mine),
        len(ended),
        max((message.t_s for message in ended), default=math.nan) - TO_S,
    )


def _flaws(told: Outcome) -> str:
    return "" if told.is_right and told.is_told_once else "NOT ONCE" if told.is_right else "WRONG"


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    rows = ["| fault | first cause | after | notified | worse | resolved | |",
            "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for each in outcomes:
        after = "" if math.isinf(each.first_s) else f"{each.first_s:.0f} s"
        ended = "" if math.isnan(each.ended_s) else f", {each.ended_s:.0f} s after its end"
        rows.append(
            f"| {each.fault.name} | {each.first or 'nothing'} | {after} | {', '.join(each.began)} "
            f"| {each.worse} | {each.ended}{ended} | {_flaws(each)} |"
        )
    return "\n".join(rows)


PAST_S = 10.0 * MIN_S
"""Until then scrapes are rare."""


def outcomes(
    names: Sequence[str], *, every_s: int, folder: Path, seed: int = 0, times_size: float = 1.0
) -> list[Outcome]:
    """How faults are told where all pools are scraped that often."""
    epoch_s = int(time.time()) // MIN_S * MIN_S - int(END_S)
    fleet = LivingFleet(scrape_s=every_s, epoch_s=epoch_s, seed=seed, times_size=times_size)
    fleet.rare_until_s = PAST_S
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    for fault in chosen:
        fault.plant(fleet, fault.name)
    player, told = played(fleet, folder, [(WATCHED_S, END_S)], cycle_s=max(15, every_s))
    return [outcome(fault, player.said, told) for fault in chosen]


def main() -> None:
    """Print how faults are told."""
    parser = ArgumentParser()
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times-size", type=float, default=1.0)
    parser.add_argument("fault", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        told = outcomes(args.fault, every_s=args.every, folder=Path(place), seed=args.seed,
                        times_size=args.times_size)  # fmt: skip
    print(table(told))


if __name__ == "__main__":
    main()
