"""A fleet that lives: pods are born, load, serve, drain and leave, as a Prometheus scrapes it.

Service discovery is as for PodMonitors: a target exists from the pod's address to its deletion, its
scrapes fail while the server loads its model, and its series end with staleness markers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count

from msgspec import Struct, field
from msgspec.structs import replace

from tests.collector.oracle import Prometheus, sample
from tests.living_engine import Engine, Work, gpu_page

FOREVER_S = math.inf
LOAD_S = 90.0
"""How long a server loads its model."""

DRAIN_S = 30.0
"""How long a pod that is deleted still answers."""

KILL_S = 15.0
"""How long its target stays after that."""

RARE_S = 60.0

HASHES = ("7d9f8c6b54", "5c4d7b9f68", "6b8f9d7c5x", "84c5d6f7b9", "59d8f7c6b4", "68c9d5b7f4")
LETTERS = "bcdfghjklmnpqrstvwxz2456789"
Labels = Mapping[str, str]


class Pod(Struct):
    """A pod and when, in seconds of the fleet's life, its target is there and answers."""

    name: str
    address: str
    node: str
    born_s: float
    ready_s: float
    silent_s: float = FOREVER_S
    gone_s: float = FOREVER_S
    deleted_s: float = FOREVER_S
    faults: list[tuple[float, float, Mapping[str, float | str]]] = field(
        default_factory=list[tuple[float, float, Mapping[str, float | str]]]
    )
    crashes: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When its server died, and when the next one answered."""

    missed: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When scrapes of its page failed."""

    def answers(self, t_s: float) -> bool:
        """Whether its server answers."""
        away = any(from_s <= t_s < to_s for from_s, to_s in (*self.crashes, *self.missed))
        return self.ready_s <= t_s < self.silent_s and not away

    def started_s(self, t_s: float) -> float:
        """When the process that answers was started."""
        return max([self.born_s, *(from_s for from_s, to_s in self.crashes if to_s <= t_s)])

    def answers_since_s(self, t_s: float) -> float:
        """Since when the process has answered that answers."""
        return max([self.ready_s, *(to_s for _, to_s in self.crashes if to_s <= t_s)])

    def delete(self, t_s: float) -> float:
        """Delete it. Returns when it is gone."""
        self.deleted_s = t_s
        self.silent_s = min(self.silent_s, t_s + DRAIN_S)
        self.gone_s = t_s + DRAIN_S + KILL_S
        return self.gone_s

    def ails(self, from_s: float, to_s: float, **changes: float | str) -> None:
        """Change its Work for a while."""
        self.faults.append((from_s, to_s, changes))


class Pool(Struct):
    """The pods of one model in one namespace, by the workload that makes them."""

    fleet: LivingFleet
    kind: str
    namespace: str
    model: str
    workload: str
    demand_per_s: Callable[[float], float]
    load_s: float = LOAD_S
    work: Work = Work()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    pods: list[Pod] = field(default_factory=list[Pod])
    version: int = 0

    def begin(self, t_s: float, replicas: int, *, load_s: float | None = None) -> list[Pod]:
        """More replicas, which load their model first."""
        return [self._born(t_s, at, load_s) for at in self._free(t_s, replicas)]

    def living(self, t_s: float) -> list[Pod]:
        """The pods that are not deleted yet, oldest first."""
        return [pod for pod in self.pods if pod.born_s <= t_s < min(pod.deleted_s, pod.gone_s)]

    def scale(self, t_s: float, replicas: int) -> None:
        """Let an autoscaler change the number of replicas."""
        living = self.living(t_s)
        self.begin(t_s, replicas - len(living))
        for pod in living[replicas:]:
            pod.delete(t_s)

    def roll(self, t_s: float, *, workload: str = "") -> float:
        """Roll a new version out, of a workload with another name if one is given. Returns when it
        is done."""
        self.version += 1
        self.workload = workload or self.workload
        for pod in reversed(self.living(t_s)):
            if self.kind == "Deployment":  # a new pod first
                (new,) = self.begin(t_s, 1)
                t_s = pod.delete(new.ready_s + 10)
            else:  # the old pod first: the new one has its name
                t_s = pod.delete(t_s) + 5
                t_s = self._born(t_s, int(pod.name.rpartition("-")[2]), None).ready_s + 10
        return t_s

    def vanish(self, t_s: float) -> None:
        """Delete all pods."""
        for pod in self.living(t_s):
            pod.delete(t_s)

    def overload(self, from_s: float, to_s: float, **changes: float | str) -> None:
        """Let all present pods behave with these changes for a while."""
        for pod in self.living(from_s):
            pod.ails(from_s, to_s, **changes)

    def _free(self, t_s: float, replicas: int) -> list[int]:
        taken = {pod.name for pod in self.living(t_s)}
        free = (at for at in count() if f"{self.workload}-{at}" not in taken)
        return [next(free) for _ in range(replicas)]

    def _born(self, t_s: float, at: int, load_s: float | None) -> Pod:
        name = f"{self.workload}-{at}"
        if self.kind == "Deployment":
            name = f"{self.workload}-{HASHES[self.version % len(HASHES)]}-{self.fleet.letters()}"
        address = self.fleet.address()
        ready_s = t_s + (self.load_s if load_s is None else load_s)
        pod = Pod(name, address, f"node-{address}", t_s, ready_s)
        self.pods.append(pod)
        if self.kind == "LeaderWorkerSet":  # its worker has no page
            worker = Pod(f"{name}-1", self.fleet.address(), "", t_s, FOREVER_S)
            self.fleet.workers.append((self, pod, worker))
        return pod

    def work_of(self, pod: Pod, t_s: float) -> tuple[Work, float]:
        """What a pod that answers does at a moment, and the requests/s that it gets: its share of
        the pool's, unless its Work states them."""
        work = self._work(pod, t_s)
        if work.arrival_per_s is not None:
            return work, work.arrival_per_s
        others = [other for other in self.pods if other.answers(t_s) and t_s < other.deleted_s]
        stated = [self._work(other, t_s).arrival_per_s for other in others]
        shared = self.demand_per_s(t_s) - sum(each for each in stated if each is not None)
        return work, max(0.0, shared) / max(1, stated.count(None))

    def _work(self, pod: Pod, t_s: float) -> Work:
        work = self.work
        for from_s, to_s, changes in pod.faults:
            if from_s <= t_s < to_s:
                work = replace(work, **changes)
        return work


LabelsOf = Callable[[Pool, Pod], Mapping[str, str]]
"""The labels of a pod's target, beside `instance`."""


def pod_monitor(pool: Pool, pod: Pod) -> Mapping[str, str]:
    """Those of a PodMonitor in each namespace."""
    return {"job": f"{pool.namespace}/vllm", "namespace": pool.namespace, "pod": pod.name}


def annotated_pods(pool: Pool, pod: Pod) -> Mapping[str, str]:
    """Those of one job for all annotated pods, as Prometheus's older examples have them."""
    names = {"kubernetes_namespace": pool.namespace, "kubernetes_pod_name": pod.name}
    return {"job": "kubernetes-pods", **names}


def addresses(_pool: Pool, _pod: Pod) -> Mapping[str, str]:
    """Those of one job with a list of addresses."""
    return {"job": "vllm"}


class LivingFleet:
    """Pools over some time, and what a Prometheus scrapes of them. Moment 0 of its life is
    `epoch_s` in Unix seconds."""

    def __init__(self, *, scrape_s: int, epoch_s: int, seed: int = 0) -> None:
        self.scrape_s, self.epoch_s, self.seed = scrape_s, epoch_s, seed
        self.sized: Callable[[int], int] = lambda planted: max(2, planted)
        """The replicas of its next pools, by those that are planted."""
        self.pools: list[Pool] = []
        self.workers: list[tuple[Pool, Pod, Pod]] = []
        self.gaps: list[tuple[float, float]] = []
        self.rare_until_s = -math.inf
        """Until then targets are scraped once in RARE_S: a past that costs little."""
        self.states: list[tuple[Series, Callable[[float], float | None]]] = []
        self.labels_of: LabelsOf = pod_monitor
        self._count = count(1)

    def pool(
        self,
        kind: str,
        namespace: str,
        replicas: int,
        *,
        at_s: float = -86_400.0,
        model: str = "",
        workload: str = "",
        per_replica_per_s: float = 2.0,
        load_s: float = LOAD_S,
        work: Work | None = None,
        **labels: str,
    ) -> Pool:
        """A pool of a Deployment, StatefulSet or LeaderWorkerSet, whose demand follows the day.
        `labels` are on the series of its pods."""
        replicas = self.sized(replicas)

        def demand_per_s(t_s: float) -> float:
            return replicas * per_replica_per_s * (1 + 0.2 * math.sin(t_s / 86_400 * math.tau))

        name = model or f"m-{namespace}"
        pool = Pool(
            self, kind, namespace, name, workload or namespace, demand_per_s, load_s,
            work or Work(), labels,
        )  # fmt: skip
        self.pools.append(pool)
        pool.begin(at_s, replicas)
        return pool

    def gap(self, from_s: float, to_s: float) -> None:
        """Let Prometheus be down for a while."""
        self.gaps.append((from_s, to_s))

    def state(self, name: str, value: Callable[[float], float | None], **labels: str) -> None:
        """Let kube-state-metrics report something of an object; None: nothing."""
        self.states.append((_series(name, {"job": "kube-state-metrics", **labels}), value))

    def letters(self) -> str:
        """The end of a new pod's name."""
        number = next(self._count) * 7919
        return "".join(LETTERS[number // 27**place % 27] for place in range(5))

    def address(self) -> str:
        """The address of a new pod."""
        number = next(self._count)
        return f"10.0.{number // 250}.{number % 250}"

    def load(self, server: Prometheus, *, from_s: float, to_s: float) -> int:
        """Write all that is scraped between two moments of its life. Returns the number of
        samples."""
        written = 0
        for rows in self.scraped(from_s=from_s, to_s=to_s):
            written += sum(map(len, rows.values()))
            server.write(
                (dict(series), b"".join(sample(self._at_ms(t_s), value) for t_s, value in samples))
                for series, samples in rows.items()
            )
        return written

    def scraped(self, *, from_s: float, to_s: float) -> Iterator[Rows]:
        """What is scraped of each target between two moments of its life: moments and values of its
        series, None where a series ends."""
        for pages in self._targets():
            rows: Rows = {}
            before: set[Series] = set()
            for t_s in self._scrapes(from_s, to_s):
                shown = dict(pages(t_s))
                for series, value in shown.items():
                    rows.setdefault(series, []).append((t_s, value))
                for series in before.difference(shown):
                    rows[series].append((t_s, None))
                before = set(shown)
            if rows:
                yield rows

    def _at_ms(self, t_s: float) -> int:
        return round((self.epoch_s + t_s) * 1000)

    def _scrapes(self, from_s: float, to_s: float) -> Iterator[float]:
        for at in range(int((to_s - from_s) // self.scrape_s) + 1):
            t_s = from_s + at * self.scrape_s
            rare = t_s < self.rare_until_s and t_s % RARE_S
            if not rare and not any(first_s <= t_s < last_s for first_s, last_s in self.gaps):
                yield t_s

    def _targets(self) -> Iterator[Pages]:
        """What each target shows at a moment."""
        for pool in self.pools:
            for pod in pool.pods:
                yield ScrapedPod(pool, pod, self.scrape_s, self.seed + next(self._count)).shown
        for pool, leader, worker in self.workers:
            yield partial(_worker, _series("up", _target(pool, worker)), leader)
        yield partial(_constant, _series("up", {"job": "prometheus", "instance": "p"}), _always)
        for series, value in self.states:
            yield partial(_constant, series, value)


# --- Operations, and faults in the midst of them -------------------------------------------------


MIN_S = 60
FAULTS_S = 10.0 * MIN_S, 22.0 * MIN_S
"""When the faults of `with_faults` begin and end."""

FAULTS = {
    "code": "engine_stalled",
    "big": "gpu_fault",
    "rag": "kv_pressure",
    "late": "admission_limit",
    "chat": "target_down",
    "lost": "target_down",
}
"""The faults of `with_faults`: the cause, by namespace."""


def operated(fleet: LivingFleet) -> LivingFleet:
    """Fifty minutes of operations: rollouts, a second model, scaling, and a Prometheus that is down
    for eight minutes (`GAP_S`)."""
    chat = fleet.pool("Deployment", "chat", 4)
    code = fleet.pool("StatefulSet", "code", 3)
    big = fleet.pool("LeaderWorkerSet", "big", 2)
    chat.roll(10 * MIN_S)
    code.roll(12 * MIN_S)
    big.roll(12 * MIN_S)
    fleet.pool("Deployment", "chat", 2, at_s=16 * MIN_S, model="m-second", workload="second")
    chat.scale(25 * MIN_S, 6)
    chat.scale(28 * MIN_S, 3)
    fleet.gap(*GAP_S)
    chat.roll(39 * MIN_S, workload="chat-v2")
    return fleet


GAP_S = 30.0 * MIN_S, 38.0 * MIN_S


def with_faults(fleet: LivingFleet) -> LivingFleet:
    """Half an hour of a fleet in which a pool is rolled while one thing goes wrong in each
    namespace of `FAULTS`."""
    pools = {name: fleet.pool("Deployment", name, 4) for name in ("chat", "rag", "lost", "late")}
    pools["code"] = fleet.pool("StatefulSet", "code", 4)
    pools["big"] = fleet.pool("LeaderWorkerSet", "big", 3)
    from_s, to_s = FAULTS_S
    pools["code"].pods[0].ails(from_s, to_s, hangs=True)
    pools["big"].pods[0].ails(from_s, to_s, hangs=True, xid=79.0)
    pools["rag"].pods[0].ails(from_s, to_s, prompt_tokens=60_000.0, hit_share=0.9)
    pools["late"].overload(from_s, to_s, arrival_per_s=14.0)
    crashed = pools["chat"].pods[0]
    crashed.silent_s, crashed.gone_s = from_s, to_s
    pools["lost"].vanish(from_s)
    pools["lost"].begin(to_s - 90, 4)
    pools["chat"].roll(8 * MIN_S)
    return fleet


# --- What is scraped ------------------------------------------------------------------------------


Series = tuple[tuple[str, str], ...]
Rows = dict[Series, list[tuple[float, float | None]]]
Pages = Callable[[float], Sequence[tuple[Series, float]]]


def _series(name: str, labels: Labels) -> Series:
    return tuple(sorted({**labels, "__name__": name}.items()))


def _target(pool: Pool, pod: Pod) -> dict[str, str]:
    return {
        **pool.fleet.labels_of(pool, pod),
        "instance": f"{pod.address}:8000",
        **pool.labels,
    }


def _worker(up: Series, leader: Pod, t_s: float) -> list[tuple[Series, float]]:
    return [(up, 0.0)] if leader.born_s <= t_s < leader.gone_s else []


def _constant(
    series: Series, value: Callable[[float], float | None], t_s: float
) -> list[tuple[Series, float]]:
    number = value(t_s)
    return [] if number is None else [(series, number)]


def _always(_t_s: float) -> float:
    return 1.0


class ScrapedPod:
    """One pod as it is scraped: its counters grow with what it does."""

    def __init__(self, pool: Pool, pod: Pod, scrape_s: float, seed: int) -> None:
        self._pool, self._pod, self._scrape_s, self._seed = pool, pod, scrape_s, seed
        self._engine, self._started_s = Engine(seed), -math.inf
        self._named: dict[tuple[str, Labels | tuple[tuple[str, str], ...]], Series] = {}
        self._last_s = 0.0

    def shown(self, t_s: float) -> list[tuple[Series, float]]:
        """Its samples at a moment, which is later than the one before."""
        pool, pod = self._pool, self._pod
        if not pod.born_s <= t_s < pod.gone_s:
            return []
        up = _series("up", _target(pool, pod)), float(pod.answers(t_s))
        if not pod.answers(t_s):
            return [up]
        started_s = pod.started_s(t_s)
        if started_s != self._started_s:
            self._engine, self._started_s = Engine(self._seed + round(started_s)), started_s
            self._last_s = t_s - self._scrape_s
        # A new process shares the demand with those that came with it.
        asked_s = max(self._last_s, pod.answers_since_s(t_s))
        work, arrival_per_s = pool.work_of(pod, asked_s)
        self._engine.live(work, arrival_per_s, t_s - self._last_s)
        self._last_s = t_s
        started = self._named_series("process_start_time_seconds", ())
        rows = [up, (started, pool.fleet.epoch_s + started_s)]
        for name, own, value in self._engine.page(work, t_s):
            rows.append((self._named_series(name, own), value))
        for name, value in gpu_page(work, self._engine.running):
            rows.append((self._named_series(name, ()), value))
        return rows

    def _named_series(self, name: str, own: tuple[tuple[str, str], ...]) -> Series:
        key = name, own
        series = self._named.get(key)
        if series is None:
            series = self._named[key] = _series(name, self._labels(name) | dict(own))
        return series

    def _labels(self, metric: str) -> dict[str, str]:
        pool, pod = self._pool, self._pod
        if metric.startswith("DCGM"):
            return {
                "exported_namespace": pool.namespace,
                "exported_pod": pod.name,
                "namespace": "gpu",
                "pod": f"dcgm-{pod.node}",
                "Hostname": pod.node,
                "modelName": "NVIDIA H100 80GB HBM3",
                "gpu": "0",
            }
        labels = _target(pool, pod)
        if metric.startswith("vllm:"):
            labels |= {"model_name": pool.model, "engine": "0"}
            if pool.fleet.labels_of is not addresses:
                labels["node"] = pod.node
        return labels
