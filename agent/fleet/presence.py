"""Determines which replicas serve, are down, are loading or have left. The evidence: scrapes of
their targets and the names of their pods. I/O edge."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet import queries
from kneewatch.agent.fleet.queries import KeptAnswers, QueryMoment, QueryScope
from kneewatch.collector.prometheus.responses import Sample
from kneewatch.diagnose.fleet.absence import is_down
from kneewatch.diagnose.fleet.inventory import (
    Gone,
    LabelMap,
    Labels,
    Loading,
    Member,
    Observed,
    Shape,
    Why,
    shape_of,
)

_SAFE = "[bcdfghjklmnpqrstvwxz2456789]"
"""The characters that Kubernetes uses in generated names (k8s.io/apimachinery/pkg/util/rand)."""

_OF_DEPLOYMENT = re.compile(rf"(.+)-{_SAFE}{{6,10}}-{_SAFE}{{5}}")
_NUMBERED = re.compile(r"(.+)-\d+")


def workloads_of(pod: str) -> set[str]:
    """The possible names of the Deployment, StatefulSet or LeaderWorkerSet of a pod.

    The pod chat-7d9f8c6b54-x2x4z belongs to the Deployment chat; chat-0 to the StatefulSet or
    LeaderWorkerSet chat; chat-0-1 to the LeaderWorkerSet chat. Empty for any other name.
    """
    names: set[str] = set()
    if match := _OF_DEPLOYMENT.fullmatch(pod):
        names.add(match[1])
    if match := _NUMBERED.fullmatch(pod):
        names.add(match[1])
        if leader := _NUMBERED.fullmatch(match[1]):
            names.add(leader[1])
    return names


class Objects:
    """Kubernetes objects, identified by name and by the labels of their kube-state-metrics
    series."""

    def __init__(self, named: Iterable[tuple[Labels, str]]) -> None:
        self._clusters: dict[tuple[str, str], set[str]] = {}
        for labels, name in named:
            place = namespace_of(labels), name
            self._clusters.setdefault(place, set()).add(labels.get("cluster", ""))

    def has(self, labels: Labels, name: str) -> bool:
        """Whether the namespace of a series contains an object of this name. If both have a cluster
        label, the clusters must be equal too."""
        clusters = self._clusters.get((namespace_of(labels), name), set())
        own = labels.get("cluster", "")
        return bool(clusters) and (not own or bool(clusters & {own, ""}))


def namespace_of(labels: Labels) -> str:
    """The namespace of the object that a series is about. Without honorLabels it is in the label
    exported_namespace."""
    names = "exported_namespace", "namespace", "kubernetes_namespace"
    return next((labels[name] for name in names if labels.get(name)), "")


def pod_of(labels: Labels) -> str:
    """The name of the pod that a series is about. Without honorLabels it is in the label
    exported_pod."""
    names = "exported_pod", "pod", "kubernetes_pod_name"
    return next((labels[name] for name in names if labels.get(name)), "")


def is_worker(pod: str, replicas: Collection[str]) -> bool:
    """Whether a pod is a worker in the LeaderWorkerSet of one of the replicas: chat-0-1 is a worker
    of chat-0. A worker has no vLLM page of its own."""
    match = _NUMBERED.fullmatch(pod)
    return match is not None and match[1] in replicas


# Which replicas serve, are down, are loading or have left, by the scrapes of their targets. I/O
# edge.


DEFAULT_PATIENCE_S = 900.0
"""Seconds that a new target may take to answer its first scrape, if no start of a server has been
observed."""

PATIENCE_S = 300.0, 3600.0
"""Minimum and maximum seconds that a new target may take to answer its first scrape, if starts of
servers have been observed."""

PATIENCE_RATIO = 1.5
"""Seconds that a new target may take to answer its first scrape, as a multiple of the longest start
that was observed."""

Space = tuple[str, str, str]
"""The cluster, namespace and job of a target. One scrape configuration finds all targets of a
job."""


def presence_of(
    moment: QueryMoment, scope: QueryScope, names: LabelMap, shape: Shape, kept: KeptAnswers
) -> Observed:
    """The replicas of the last hour: those that serve (`shape`), and those that do not.

    After a scrape fails, a metrics system can return the old values for minutes; these are dropped.
    """
    left = moment.instants({"vanished": queries.vanished(scope)})["vanished"]
    vanished = shape_of((sample.labels for sample in left), names)
    seen_s = {vanished.key(sample.labels): sample.value for sample in left}
    seen = [*shape.members, *vanished.members]
    jobs = sorted({job for member in seen if (job := member.labels.get("job"))})
    targets = moment.instants({"up": queries.targets(jobs)})["up"] if jobs else ()
    spaces = {_space(member.labels) for member in seen}
    targets = [up for up in targets if _space(up.labels) in spaces]
    failures = _failures(moment, [up.labels for up in targets if not up.value])
    failing = TargetSet(failure.labels for failure in failures.values())
    members = tuple(member for member in shape.members if member.labels not in failing)
    stopped = [(member, None) for member in shape.members if member.labels in failing] + [
        (member, seen_s.get(member.key)) for member in vanished.members
    ]
    gone = _gone(stopped, members, failing, failures)
    engines = frozenset(member.key for member in shape.members)
    counts = kept.instants(moment, {"scrapes": queries.scrapes(scope)}, engines)
    interval_s = scrape_interval_s(counts["scrapes"], shape)
    empty = {row.pool for row in gone} - {member.pool for member in members}
    zero, is_scraping = None, True
    if empty:
        zero = _scaled_to_zero(moment, [each for each in stopped if each[0].pool in empty])
        is_scraping = bool(moment.instants({"any scrapes": queries.ANY_SCRAPES})["any scrapes"])
    return Observed(
        moment.at_s,
        moment.source.url,
        scope.window_s,
        replace(shape, members=members),
        gone=gone,
        stopped=[member for member, _ in stopped],
        loading=_loading(
            moment,
            names,
            seen,
            targets,
            failures.values(),
            jobs,
            interval_s,
            selected=bool(scope.selector),
        ),
        scrape_interval_s=interval_s,
        scaled_to_zero=zero,
        renamed=_renamed([member for member in vanished.members if member.pool in empty], members),
        is_scraping=is_scraping,
    )


def _gone(
    stopped: Sequence[tuple[Member, float | None]],
    members: Sequence[Member],
    failing: TargetSet,
    failures: Mapping[Target, _Failure],
) -> list[Gone]:
    """The replicas whose engines have all stopped. `stopped` are engines that stopped, with the
    Unix time of their last sample."""
    running = {(member.replica, member.pool) for member in members}
    gone: dict[tuple[str, str], Gone] = {}
    for member, seen_s in stopped:
        name, up = (member.replica, member.pool), failing.of(member.labels)
        failure = None if up is None else failures[_target(up)]
        why = Why.LEFT if failure is None else failure.why
        if failure is not None and failure.failed_s and why is not Why.TERMINATING:
            seen_s = failure.failed_s[0]
        if name not in running and (name not in gone or gone[name].why is Why.LEFT):
            gone[name] = Gone(*name, why, seen_s)
    return list(gone.values())


# --- Targets and their failed scrapes -------------------------------------------------------------


class TargetSet:
    """A set of targets. A target is found by the labels of its series `up` or of a series on its
    page.

    Several clusters may have the same job and address, so all labels that both have must be equal.
    """

    def __init__(self, series: Iterable[Labels]) -> None:
        self._targets: dict[tuple[str, str], list[Labels]] = {}
        for labels in series:
            self._targets.setdefault(_scrape(labels), []).append(labels)

    def __contains__(self, labels: Labels) -> bool:
        """Whether a series with these labels belongs to one of the targets."""
        return self.of(labels) is not None

    def of(self, labels: Labels) -> Labels | None:
        """The target of a series with these labels. None if no target of this set has the
        series."""
        targets = self._targets.get(_scrape(labels), ())
        return next((target for target in targets if _agree(target, labels)), None)


def _scrape(labels: Labels) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _agree(target: Labels, labels: Labels) -> bool:
    return all(
        labels.get(name, value) == value for name, value in target.items() if name != "__name__"
    )


Target = tuple[tuple[str, str], ...]


class _Failure(Struct, frozen=True):
    """A target whose scrapes fail.

    `failed_s` are the Unix times of the failed scrapes since the last successful one, at most an
    hour back. `answered`: there was a successful scrape within that hour.
    """

    labels: Labels
    failed_s: Sequence[float]
    answered: bool
    why: Why


def _failures(moment: QueryMoment, failing: Sequence[Labels]) -> dict[Target, _Failure]:
    """The targets whose scrapes fail, each with the reason."""
    if not failing:
        return {}
    deleted = moment.instants({"deleted pods": queries.DELETED})["deleted pods"]
    terminating = Objects((sample.labels, pod_of(sample.labels)) for sample in deleted)
    points = {
        _target(track.labels): track.points
        for track in moment.tracks("failed scrapes", queries.scrapes_of(failing))
    }
    failures: dict[Target, _Failure] = {}
    for labels in failing:
        target = _target(labels)
        scrapes = points.get(target, ())
        times_s = _since_answer(scrapes)
        over_s = times_s[-1] - times_s[0] if times_s else 0.0
        why = Why.DOWN if is_down(len(times_s), over_s) else Why.FAILING
        if terminating.has(labels, pod_of(labels)):
            why = Why.TERMINATING
        failures[target] = _Failure(labels, times_s, len(times_s) < len(scrapes), why)
    return failures


def _target(labels: Labels) -> Target:
    return tuple(sorted((k, v) for k, v in labels.items() if k != "__name__"))


def _since_answer(scrapes: Sequence[tuple[float, float]]) -> list[float]:
    failed_s: list[float] = []
    for t_s, value in scrapes:
        if value:
            failed_s.clear()
        else:
            failed_s.append(t_s)
    return failed_s


def scrape_interval_s(counts: Sequence[Sample], shape: Shape) -> float | None:
    """Seconds between two scrapes, in the pool that is scraped least often. None if no engine is
    old enough.

    `counts` has the number of scrapes of each engine in the last SCRAPES_OVER_S seconds.
    """
    pools = {member.key: member.pool for member in shape.members}
    scrapes: dict[str, list[float]] = {}
    for sample in counts:
        pool = pools.get(shape.key(sample.labels))
        if pool is not None and sample.value >= 1:
            scrapes.setdefault(pool, []).append(sample.value)
    rarest = min((median(values) for values in scrapes.values()), default=None)
    return None if rarest is None else queries.SCRAPES_OVER_S / rarest


# --- Targets that have not answered yet -----------------------------------------------------------


def _loading(
    moment: QueryMoment,
    names: LabelMap,
    seen: Sequence[Member],
    targets: Sequence[Sample],
    failures: Iterable[_Failure],
    jobs: Sequence[str],
    interval_s: float | None,
    *,
    selected: bool,
) -> list[Loading]:
    """The targets that have not answered in the last hour and belong to the pool of a member in
    `seen`."""
    servers = TargetSet(member.labels for member in seen)
    silent = [
        failure
        for failure in failures
        if not failure.answered
        and failure.labels not in servers
        and failure.why is not Why.TERMINATING
    ]
    if not silent:
        return []
    # A silent target may be a vLLM like its peers, or another program in the same job.
    mixed = {_space(up.labels) for up in targets if up.value and up.labels not in servers}
    replicas = {member.replica for member in seen}
    patience_s = _patience_s(moment, jobs, interval_s)
    loading: list[Loading] = []
    for failure in silent:
        labels = failure.labels
        space, replica = _space(labels), names.value_of("replica", labels) or "?"
        peers = [member for member in seen if _space(member.labels) == space]
        siblings = [m for m in peers if workloads_of(m.replica) & workloads_of(replica)]
        if not siblings and (selected or space in mixed):
            continue
        if is_worker(replica, replicas) or not peers:
            continue
        pools = sorted({member.pool for member in siblings or peers})
        of_job = "/".join(filter(None, space))  # which of several models it serves is unknown
        loading.append(
            Loading(
                replica,
                pools[0] if siblings or len(pools) == 1 else of_job,
                failure.failed_s[0] if failure.failed_s else moment.at_s,
                patience_s.get(space, DEFAULT_PATIENCE_S),
            )
        )
    return loading


def _space(labels: Labels) -> Space:
    return labels.get("cluster", ""), namespace_of(labels), labels.get("job", "")


def _patience_s(
    moment: QueryMoment, jobs: Sequence[str], interval_s: float | None
) -> dict[Space, float]:
    """Seconds that a new target may take to answer its first scrape, by cluster, namespace and job.
    Jobs in which no start of a server was observed are left out."""
    if interval_s is None:
        return {}
    least_s, most_s = PATIENCE_S
    failed = moment.instants({"starts": queries.failed_before_first_answer(jobs)})["starts"]
    patience_s: dict[Space, float] = {}
    for sample in failed:
        space, start_s = _space(sample.labels), sample.value * interval_s
        limited_s = min(most_s, max(least_s, PATIENCE_RATIO * start_s))
        patience_s[space] = max(limited_s, patience_s.get(space, 0.0))
    return patience_s


# --- Pools without a running replica --------------------------------------------------------------


def _scaled_to_zero(
    moment: QueryMoment, stopped: Sequence[tuple[Member, float | None]]
) -> frozenset[str] | None:
    """The pools whose workloads want no replica, or wanted none after the pool's last one had
    stopped. None without kube-state-metrics. `stopped` are the pools' engines, with the Unix time
    of their last sample."""
    answers = moment.instants({"workloads": queries.WORKLOADS, "zero": queries.WANTED_NONE})
    if not answers["workloads"]:
        return None
    wanted_none = [
        (sample.value, Objects([(labels, labels.get("deployment", labels.get("statefulset", "")))]))
        for sample in answers["zero"]
        for labels in [sample.labels]
    ]
    last_s: dict[str, float] = {}
    for member, seen_s in stopped:
        last_s[member.pool] = max(seen_s or 0.0, last_s.get(member.pool, 0.0))
    return frozenset(
        member.pool
        for member, _ in stopped
        for name in workloads_of(pod_of(member.labels))
        for zero_s, workload in wanted_none
        if zero_s >= last_s[member.pool] and workload.has(member.labels, name)
    )


def _renamed(stopped: Sequence[Member], members: Sequence[Member]) -> dict[str, str]:
    """For each pool whose workloads or servers now serve another model: the pool to which they
    belong now."""
    serving: dict[tuple[Space, str], str] = {}
    for member in members:
        serving |= {(_space(member.labels), name): member.pool for name in _servers(member)}
    return {
        member.pool: serving[place]
        for member in stopped
        for name in _servers(member)
        if (place := (_space(member.labels), name)) in serving
    }


def _servers(member: Member) -> set[str]:
    return workloads_of(member.replica) or {member.replica}
