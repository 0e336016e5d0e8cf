"""The state of a fleet at one moment, read from a metrics system, and its diagnosis. I/O edge."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import inf, isfinite
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.agent.fleet import queries
from kneewatch.agent.fleet.engines import FleetEngines, verdicts_of
from kneewatch.agent.fleet.presence import namespace_of, pod_of, presence_of
from kneewatch.agent.fleet.queries import (
    COUNTED,
    GPUS,
    XIDS,
    AnswerLog,
    KeptAnswers,
    QueryMoment,
    QueryScope,
    checked_selector,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.engines.engine_kind import PROGRAM
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from kneewatch.collector.prometheus.responses import Piece, Sample, pieces, steps_of
from kneewatch.collector.signals.promql import range_s
from kneewatch.collector.signals.routers import router_queries
from kneewatch.diagnose.deployment.server_state import CLOCK_SEEN, GpuState, XidSeen
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.inventory import (
    PAST_HOURS_S,
    STEP_S,
    Group,
    Key,
    LabelMap,
    Labels,
    Member,
    Observed,
    Past,
    Peak,
    QueryLoad,
    Shape,
    Usual,
    label_map,
    peak_of,
    shape_of,
    usual_of,
)
from kneewatch.diagnose.fleet.routers import routers_of
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.fleet.workload_drift import SIGNALS
from kneewatch.diagnose.values import GpuReading, Histogram
from kneewatch.rules.rule import WEEK_S

# --- The history of a fleet -----------------------------------------------------------------------


PARTS = 4
"""Number of parallel queries for a long range: a server evaluates each query on one core."""

Lengths = dict[Group, dict[str, tuple[Histogram, Histogram]]]
Recent = dict[Group, dict[str, Histogram]]


class _Groups:
    """Finds the group of a series by its labels. If labels fit several groups, the series has no
    group."""

    def __init__(self, shape: Shape, names: Sequence[str]) -> None:
        self._names = names
        groups: dict[tuple[str, ...], set[Group]] = {}
        for member in shape.members:
            groups.setdefault(self._key(member.labels), set()).add(member.group)
        self._groups = {
            key: next(iter(candidates))
            for key, candidates in groups.items()
            if len(candidates) == 1
        }

    def of(self, labels: Labels) -> Group | None:
        """The group of a series with these labels. None if no group fits, or several."""
        return self._groups.get(self._key(labels))

    def __len__(self) -> int:
        return len(self._groups)

    def _key(self, labels: Labels) -> tuple[str, ...]:
        return tuple(labels.get(name, "") for name in self._names)


def past_of(
    source: PrometheusSource,
    scope: QueryScope,
    shape: Shape,
    names: Sequence[str],
    *,
    at_s: float,
    lookback_s: float,
) -> Past:
    """The history of groups; the values of the labels `names` define a group.

    If the history is incomplete, the result contains the reason instead of peaks.
    """
    groups = _Groups(shape, names)
    if not len(groups):
        return Past()
    lengths, recent, missing = _lengths(source, scope, groups, names, at_s)
    usual, unknown = _usual(source, scope, groups, names, at_s)
    missing = missing or unknown
    query = queries.running_requests(scope, names)
    try:
        peaks = _peaks(source, query, groups, at_s=at_s, span_s=lookback_s)
    except CollectError as exc:
        return Past({}, lengths, str(exc), recent, usual)
    return Past(peaks, lengths, missing, recent, usual)


def _peaks(
    source: PrometheusSource, query: str, groups: _Groups, *, at_s: float, span_s: float
) -> dict[Group, Peak]:
    """The peak of each group.

    Raises:
        CollectError: a part of the history cannot be read.
    """
    steps = steps_of(from_s=at_s - span_s, to_s=at_s, step_s=STEP_S)
    spans = pieces(from_s=at_s - span_s, to_s=at_s, step_s=STEP_S, steps=-(-steps // PARTS))

    def part(span: tuple[float, float]) -> list[Piece]:
        ranged = source.range(
            query, from_s=span[0], to_s=span[1], step_s=STEP_S, series=len(groups)
        )
        return list(ranged)

    points: dict[Group, dict[float, float]] = {}
    with ThreadPoolExecutor(PARTS) as pool:
        for piece in chain.from_iterable(pool.map(part, spans)):
            if piece.warnings:
                raise CollectError(f"partial: {piece.warnings[0]}", kind="query", hint="")
            for track in piece.tracks:
                group = groups.of(track.labels)
                if group is not None:
                    total = points.setdefault(group, {})
                    for t_s, value in track.points:
                        total[t_s] = total.get(t_s, 0.0) + value
    peaks = {
        group: peak_of(list(total.items()), span_s=span_s, steps=steps)
        for group, total in points.items()
    }
    return {group: peak for group, peak in peaks.items() if peak is not None}


def _lengths(
    source: PrometheusSource, scope: QueryScope, groups: _Groups, names: Sequence[str], at_s: float
) -> tuple[Lengths, Recent, str]:
    """Request lengths by group, in three parts. The first has pairs of the lengths a week ago and
    now. The second has the lengths now, also for groups without a past. The third is the reason if
    the other two are empty, else ""."""
    query_by_key = {
        f"{key} {is_past}": query for (key, is_past), query in queries.lengths(scope, names).items()
    }
    answers, missing = _complete(source, query_by_key, at_s)
    if missing:
        return {}, {}, f"lengths of requests: {missing}"
    read: dict[str, Mapping[Group, Histogram]] = {
        key: _buckets(samples, groups) for key, samples in answers.items()
    }
    lengths: Lengths = {}
    recent: Recent = {}
    for key in SIGNALS.values():
        before, now = read[f"{key} True"], read[f"{key} False"]
        for group, buckets in now.items():
            recent.setdefault(group, {})[key] = buckets
            if group in before:
                lengths.setdefault(group, {})[key] = before[group], buckets
    return lengths, recent, ""


def _usual(
    source: PrometheusSource, scope: QueryScope, groups: _Groups, names: Sequence[str], at_s: float
) -> tuple[dict[Group, Usual], str]:
    """The usual hit ratio, looked-up tokens/s and TTFT of each group, from past hours.

    Groups with too little data are left out. The second value is "", or the reason if a query
    failed or was partial; then no group has values.
    """
    hours: dict[Group, dict[float, dict[str, float]]] = {}
    for age_s in PAST_HOURS_S:
        answers, missing = _complete(source, queries.hourly(scope, names), at_s - age_s)
        if missing:
            return {}, f"usual hit ratio: {missing}"
        for key, samples in answers.items():
            for sample in samples:
                group = groups.of(sample.labels)
                if group is not None and isfinite(sample.value):
                    hours.setdefault(group, {}).setdefault(age_s, {})[key] = sample.value
    usual = {group: usual_of(by_age) for group, by_age in hours.items()}
    return {group: values for group, values in usual.items() if values is not None}, ""


def _complete(
    source: PrometheusSource, queries_by_key: Mapping[str, str], at_s: float
) -> tuple[dict[str, Sequence[Sample]], str]:
    """The samples of each query, and the reason if they are incomplete, else ""."""
    log = AnswerLog()
    answers = QueryMoment(source, log, at_s).instants(queries_by_key)
    failed = next(map(str, log.failed.values()), "")
    partial = next((f"partial: {warning}" for warning in log.warnings), "")
    return answers, failed or partial


def _buckets(samples: Sequence[Sample], groups: _Groups) -> dict[Group, dict[float, float]]:
    buckets: dict[Group, dict[float, float]] = {}
    for sample in samples:
        group, edge = groups.of(sample.labels), _edge(sample.labels.get("le", ""))
        if group is not None and edge is not None:
            counts = buckets.setdefault(group, {})
            counts[edge] = counts.get(edge, 0.0) + sample.value
    return buckets


def _edge(text: str) -> float | None:
    try:
        return inf if text == "+Inf" else float(text)
    except ValueError:
        return None


MODEL = ("modelName", "model_name")
NODE = ("Hostname", "hostname", "node")
Place = tuple[str, ...]


def with_gpus(
    shape: Shape, answers: Mapping[str, Sequence[Sample]]
) -> tuple[Shape, dict[Key, dict[str, float]], dict[Key, tuple[GpuState, ...]]]:
    """Add DCGM's data to a fleet. Returns the shape, GPU signals by engine, and the GPUs with an
    XID by engine.

    Engines without a tier label get the GPU's model as their tier. Engines that are not vLLM have a
    tier of their own, so nothing is averaged across kinds of engines. The signal `gpus` (number of
    GPUs) exists only where DCGM names the pod: other GPUs of a node may belong to other pods.
    """
    by_place: dict[Place, dict[str, float]] = {}
    models: dict[Place, set[str]] = {}
    boards: dict[Place, dict[str, dict[str, float]]] = {}
    for key, samples in answers.items():
        fold = min if GPUS.get(key, ("max",))[0] == "min" else max
        for sample in samples:
            for place in places(sample.labels):
                if key == COUNTED and place[0] != "pod":
                    continue
                if key in XIDS:
                    gpus = boards.setdefault(place, {})
                    board = gpus.setdefault(sample.labels.get("gpu", ""), {})
                    board[key] = max(board.get(key, sample.value), sample.value)
                figures = by_place.setdefault(place, {})
                figures[key] = fold(figures.get(key, sample.value), sample.value)
                if model := next((sample.labels[n] for n in MODEL if sample.labels.get(n)), ""):
                    models.setdefault(place, set()).add(model)
    members: list[Member] = []
    figures_by_engine: dict[Key, dict[str, float]] = {}
    faulty: dict[Key, tuple[GpuState, ...]] = {}
    for member in shape.members:
        occupied = [place for place in places_of(member) if place in by_place]
        program = member.labels.get(PROGRAM, "")
        if not occupied:
            members.append(replace(member, tier=f"{member.tier} {program}".strip()))
            continue
        figures_by_engine[member.key] = by_place[occupied[0]]
        faulty[member.key] = tuple(
            _faulty(gpu, member.node, board)
            for gpu, board in sorted(boards.get(occupied[0], {}).items())
            if queries.XID in board
        )
        gpu_models = models.get(occupied[0], set())
        tier = member.tier or (next(iter(gpu_models)) if len(gpu_models) == 1 else "")
        members.append(replace(member, tier=f"{tier} {program}".strip()))
    return replace(shape, members=tuple(members)), figures_by_engine, faulty


def _faulty(gpu: str, node: str, board: Mapping[str, float]) -> GpuState:
    """A GPU with its last XID. For an XID within the last hour the exact time is unknown."""
    worked = queries.XID_WORKED in board
    since_s = 0.0 if queries.XID_NEW in board else None
    xid = XidSeen(int(board[queries.XID]), since_s, worked)
    return GpuState(gpu, "", node, "", xids=(xid,), is_awake=worked)


def places(labels: Labels) -> Iterable[Place]:
    """Yields the pod and the nodes of a GPU. Without honorLabels the labels of the workload are
    named exported_*."""
    pod = pod_of(labels)
    namespace = namespace_of(labels)
    cluster = labels.get("cluster", "")
    if pod and (labels.get("exported_pod") or "dcgm" not in pod):
        yield "pod", cluster, namespace, pod
    for node in dict.fromkeys(labels[name] for name in NODE if labels.get(name)):
        yield "node", cluster, node


def places_of(member: Member) -> Iterable[Place]:
    """Yields the pods and nodes on which an engine's GPUs may be, the most specific first. Each one
    comes first with the engine's cluster, then without a cluster, because DCGM's series may lack
    that label."""
    labels = member.labels
    clusters = dict.fromkeys((labels.get("cluster", ""), ""))
    if pod := pod_of(labels):
        for cluster in clusters:
            yield "pod", cluster, namespace_of(labels), pod
    for node in (member.node, labels.get("instance", "").rpartition(":")[0]):
        for cluster in clusters if node else ():
            yield "node", cluster, node


def images_of(members: Iterable[Member], samples: Sequence[Sample]) -> dict[Key, str]:
    """The container image of each engine. If the pod of an engine has several such images and its
    series does not name the container, the engine is left out."""
    by_pod: dict[Place, dict[str, set[str]]] = {}
    for sample in samples:
        labels = sample.labels
        image = labels.get("image_spec") or labels.get("image", "")
        container = labels.get("exported_container") or labels.get("container", "")
        for place in places(labels):
            by_pod.setdefault(place, {}).setdefault(container, set()).add(image)
    images: dict[Key, str] = {}
    for member in members:
        pod = next((place for place in places_of(member) if place in by_pod), None)
        containers = dict[str, set[str]]() if pod is None else by_pod[pod]
        own = containers.get(member.labels.get("container", ""))
        candidates = own or {image for several in containers.values() for image in several}
        if len(candidates) == 1:
            images[member.key] = next(iter(candidates))
    return images


# --- The snapshot ---------------------------------------------------------------------------------


SKEW_SHOWN_S = 1.0
DEFAULT_SCRAPES_S = 15.0
"""Assumed seconds between scrapes if they cannot be measured."""


class Shard(Struct, frozen=True):
    """The pools of one of several daemons that share a fleet: those whose hash, modulo `count`, is
    `index`."""

    index: int = 0
    count: int = 1

    def has(self, pool: str) -> bool:
        """Whether this daemon judges the pool."""
        return crc32(pool.encode()) % self.count == self.index

    def of(self, fleet: Observed) -> Observed:
        """The replicas that this daemon judges."""
        members = tuple(member for member in fleet.shape.members if self.has(member.pool))
        return replace(
            fleet,
            shape=replace(fleet.shape, members=members),
            gone=[replica for replica in fleet.gone if self.has(replica.pool)],
            stopped=[member for member in fleet.stopped if self.has(member.pool)],
            loading=[replica for replica in fleet.loading if self.has(replica.pool)],
        )


WHOLE = Shard()
SHARD = re.compile(r"([1-9][0-9]*)/([1-9][0-9]*)")


def shard_of(text: str | None, origin: str) -> Shard:
    """The shard that a setting such as `1/2` names; all pools without one.

    Raises:
        SettingsError: the text names no shard.
    """
    if text is None:
        return WHOLE
    match = SHARD.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise SettingsError(
            f"fleet.shard ({origin}): {text!r} is not a part of a whole: use 1/2 and 2/2 for two "
            "daemons"
        )
    return Shard(int(match[1]) - 1, int(match[2]))


class FleetConfig(Struct, frozen=True):
    """The fleet to diagnose.

    `selector` are label matchers, `names` maps labels to roles, `at_s` is the moment (None: now),
    `lookback_s` is the time in which peaks are searched. If `past` is given, no queries for the
    past are sent. `profile` has the rules and targets to judge by. `shard` selects pools.
    """

    selector: str
    names: LabelMap
    at_s: float | None = None
    lookback_s: float = WEEK_S
    past: Past | None = None
    profile: Profile = field(default_factory=Profile)
    shard: Shard = WHOLE


def observe(
    source: PrometheusSource, config: FleetConfig, engines: FleetEngines | None = None
) -> Observed:
    """The state of the fleet at the configured moment. For "now" the clock of the metrics system is
    used.

    `engines` are the engines as judged so far; without them their last half hour is judged first.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    started_s, queries_before, retried_before = time.monotonic(), source.asked, source.retried
    engines = engines or FleetEngines(config.profile)
    log, scope = AnswerLog(), QueryScope(config.selector, config.profile.window_s)
    clock, answer = source.now(queries.presence(scope) if config.at_s is None else "")
    at_s = clock.server_s
    if config.at_s is not None:
        at_s = config.at_s
        answer = source.instant(queries.presence(scope), at_s)
    running = log.samples("presence", answer)
    shape = shape_of([sample.labels for sample in running], config.names)
    scope = scope.for_engines(shape.by, [sample.labels for sample in running])
    moment = QueryMoment(source, log, at_s)
    observed = config.shard.of(presence_of(moment, scope, config.names, shape, engines.kept))
    interval_s = observed.scrape_interval_s
    if interval_s is not None:
        scope = replace(scope, window_s=range_s(config.profile.window_s, interval_s))
    if not running and not observed.gone:
        raise _no_series_error(source, config)
    observed, gpus = _with_pods(moment, scope, observed, engines.kept)
    answers = engines.kept.instants(moment, router_queries())
    members = observed.shape.members
    past = config.past
    if past is None:
        past = past_of(
            source,
            scope,
            observed.shape,
            config.names.grouping(member.labels for member in members),
            at_s=at_s,
            lookback_s=config.lookback_s,
        )
    usual = {group: {"prefix_hit_ratio": values.hit_ratio} for group, values in past.usual.items()}
    judged = engines.cycle(
        source,
        log,
        scope,
        members,
        gpus,
        usual,
        at_s=at_s,
        interval_s=interval_s or DEFAULT_SCRAPES_S,
        stopped=observed.stopped,
    )
    skewed = abs(clock.skew_s) > max(SKEW_SHOWN_S, clock.within_s)
    begun = ((key, engine.reader.history.started_s) for key, engine in judged.items())
    ages = {key: {"age_s": at_s - begun_s} for key, begun_s in begun if begun_s is not None}
    return replace(
        observed,
        window_s=scope.window_s,
        values={key: {**own, **ages.get(key, {})} for key, own in observed.values.items()},
        verdicts=verdicts_of(judged),
        configs={key: engine.reader.config for key, engine in judged.items()},
        past=past,
        restarted=engines.restarted((*members, *observed.stopped), at_s),
        failed={name: str(error) for name, error in log.failed.items()},
        warnings=tuple(log.warnings),
        skew_s=clock.skew_s if skewed else None,
        load=QueryLoad(
            source.asked - queries_before,
            source.retried - retried_before,
            time.monotonic() - started_s,
        ),
        routers=routers_of(
            {key: [(s.labels, s.value) for s in samples] for key, samples in answers.items()}
        ),
    )


Values = dict[Key, dict[str, float]]


def readings_of(
    shape: Shape, gpus: Values, faulty_gpus: Mapping[Key, tuple[GpuState, ...]]
) -> dict[Key, GpuReading]:
    """The GPUs of each engine that report an XID, and the clock where no other replica shows what
    is usual. If DCGM does not name the pod, they may be another's."""
    replicas = Counter(group for group, _ in {(m.group, m.replica) for m in shape.members})
    return {
        member.key: GpuReading(
            unknown=(),
            guess=queries.COUNTED not in gpus[member.key],
            states=(
                *faulty_gpus[member.key],
                *(_clocked(member, gpus[member.key]) if replicas[member.group] == 1 else ()),
            ),
        )
        for member in shape.members
        if member.key in faulty_gpus
    }


def _clocked(member: Member, figures: Mapping[str, float]) -> Iterator[GpuState]:
    """Yields the state of the slowest of an engine's GPUs."""
    now_mhz, usual_mhz = figures.get("sm_clock_mhz"), figures.get(queries.USUAL_MHZ)
    if now_mhz is not None and usual_mhz is not None:
        clock_hz = dict.fromkeys(("gpu_sm_clock_hz", "gpu_sm_clock_most_hz"), 1e6 * now_mhz)
        yield GpuState("", "", member.node, "", {**clock_hz, CLOCK_SEEN: 1e6 * usual_mhz})


def faulty_gpus_at(moment: QueryMoment, scope: QueryScope, shape: Shape) -> dict[Key, GpuReading]:
    """The GPUs of each engine that report an XID at a moment."""
    asked = queries.gpu_queries(scope)
    answers = moment.instants({key: asked[key] for key in (queries.COUNTED, *XIDS)})
    return readings_of(*with_gpus(shape, answers))


def _with_pods(
    moment: QueryMoment, scope: QueryScope, observed: Observed, kept: KeptAnswers
) -> tuple[Observed, dict[Key, GpuReading]]:
    """Add the data of hours, pods and GPUs. Returns also the GPUs with an XID."""
    shape = observed.shape
    values: Values = {member.key: {} for member in shape.members}
    of_engines = kept.instants(
        moment,
        {
            **queries.hourly_queries(scope),
            "images": queries.images(),
            queries.USUAL_MHZ: queries.usual_clock(scope),
        },
        frozenset(values),
    )
    figures = {**of_engines, **moment.instants(queries.own_queries(scope))}
    images = images_of(shape.members, figures.pop("images"))
    usual_mhz = {queries.USUAL_MHZ: figures.pop(queries.USUAL_MHZ)}
    for key, samples in figures.items():
        for sample in samples:
            engine = values.get(shape.key(sample.labels))
            if engine is not None and sample.value == sample.value:
                engine[key] = sample.value
    newest = kept.instants(moment, queries.gpu_queries(scope))
    shape, gpus, faulty = with_gpus(shape, {**newest, **usual_mhz})
    observed = replace(observed, shape=shape, values=values, gpus=gpus, images=images)
    return observed, readings_of(shape, gpus, faulty)


def _no_series_error(source: PrometheusSource, config: FleetConfig) -> CollectError:
    matching = f" that match {config.selector}" if config.selector else ""
    return CollectError(
        f"{source.url}: no series of vLLM servers{matching}, nor of other engines "
        f"(…{queries.PRESENCE})",
        kind="no_vllm",
        hint="check that it scrapes vLLM, and check --selector; Mimir and Cortex need a tenant: "
        "--header X-Scope-OrgID=TENANT",
    )


# --- A fleet's diagnosis by the settings. I/O edge ------------------------------------------------


def source_settings(settings: Settings) -> SourceSettings:
    """The settings for queries to a metrics system."""
    return SourceSettings(
        fetch=settings.fetch(),
        query_timeout_s=settings["fleet.query_timeout_s"],
        at_once=settings["fleet.queries_at_once"],
        per_s=settings["fleet.queries_per_s"],
    )


def fleet_config(settings: Settings, selector: str, *, at_s: float | None = None) -> FleetConfig:
    """The fleet to diagnose.

    Raises:
        SettingsError: the selector is no list of matchers, or fleet.labels has an unknown role.
    """
    return FleetConfig(
        checked_selector(selector, "--selector"),
        label_map(
            settings["fleet.labels"] or {},
            settings.origin("fleet.labels"),
            settings["fleet.throughput_pools"] or (),
        ),
        at_s,
        settings["fleet.lookback_s"],
        profile=settings.profile(stated=stated(settings)),
        shard=shard_of(settings["fleet.shard"], settings.origin("fleet.shard")),
    )


def diagnose_fleet(
    url: str, settings: Settings, selector: str, *, at_s: float | None
) -> FleetVerdict:
    """The diagnosis of the fleet that the metrics system at `url` scrapes, now or at a moment.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    config = fleet_config(settings, selector, at_s=at_s)
    with PrometheusSource(url, source_settings(settings)) as source:
        return diagnose(observe(source, config), config.profile)
