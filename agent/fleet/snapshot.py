"""The state of a fleet at one moment, read from a metrics system, and its diagnosis. I/O edge."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.agent.fleet import queries
from kneewatch.agent.fleet.past_days import past_of
from kneewatch.agent.fleet.presence import namespace_of, pod_of, presence_of
from kneewatch.agent.fleet.queries import (
    COUNTED,
    GPUS,
    XIDS,
    AnswerLog,
    QueryMoment,
    QueryScope,
    checked_selector,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_resolver import BLOCKS, own_blocks
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from kneewatch.collector.prometheus.responses import Sample
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis, diagnose
from kneewatch.diagnose.fleet.engine_state import Coverage, coverage
from kneewatch.diagnose.fleet.inventory import (
    WEEK_S,
    Key,
    LabelMap,
    Labels,
    Load,
    Member,
    Observed,
    Past,
    Shape,
    label_map,
    shape_of,
)
from kneewatch.diagnose.fleet.routers import router_queries, routers_of
from kneewatch.diagnose.values import GpuState, XidSeen
from kneewatch.rules.facts import range_s
from kneewatch.rules.rule import Severity

MODEL = ("modelName", "model_name")
NODE = ("Hostname", "hostname", "node")
Place = tuple[str, ...]


def with_gpus(
    shape: Shape, answers: Mapping[str, Sequence[Sample]]
) -> tuple[Shape, dict[Key, dict[str, float]], dict[Key, tuple[GpuState, ...]]]:
    """Add DCGM's data to a fleet. Returns the shape, GPU signals by engine, and the GPUs with an
    XID by engine.

    Engines without a tier label get the GPU's model as their tier. The signal `gpus` (number of
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
        if not occupied:
            members.append(member)
            continue
        figures_by_engine[member.key] = by_place[occupied[0]]
        faulty[member.key] = tuple(
            _faulty(gpu, member.node, board)
            for gpu, board in sorted(boards.get(occupied[0], {}).items())
            if queries.XID in board
        )
        gpu_models = models.get(occupied[0], set())
        tier = member.tier or (next(iter(gpu_models)) if len(gpu_models) == 1 else "")
        members.append(replace(member, tier=tier))
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
    if labels.get("pod"):
        for cluster in clusters:
            yield "pod", cluster, labels.get("namespace", ""), labels["pod"]
    for node in (member.node, labels.get("instance", "").rpartition(":")[0]):
        for cluster in clusters if node else ():
            yield "node", cluster, node


def images_of(members: Iterable[Member], samples: Sequence[Sample]) -> dict[Key, str]:
    """The container image of each engine. If the pod of an engine has several vLLM images and its
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


# --- KV pools -------------------------------------------------------------------------------------


def kv_pools(configs: Mapping[Key, Labels], members: Sequence[Member]) -> dict[Key, Labels]:
    """The labels of cache_config_info by engine. The number of blocks is that of the engine alone,
    although some vLLM versions report the sum over all engines of a replica."""
    by_replica: dict[tuple[str, str, str], list[Key]] = {}
    for member in members:
        if member.key in configs:
            replica = member.pool, member.replica, member.model
            by_replica.setdefault(replica, []).append(member.key)
    pools = dict(configs)
    for keys in by_replica.values():
        blocks = own_blocks([configs[key] for key in keys])
        if blocks is not None:
            pools |= {key: {**configs[key], BLOCKS: blocks} for key in keys}
    return pools


# --- The snapshot ---------------------------------------------------------------------------------


SKEW_SHOWN_S = 1.0
DEFAULT_SCRAPES_S = 15.0
"""Assumed seconds between scrapes if they cannot be measured."""

RECORDED = "kneewatch:running"


class FleetConfig(Struct, frozen=True):
    """The fleet to diagnose.

    `selector` are label matchers, `names` maps labels to roles, `at_s` is the moment (None: now),
    `lookback_s` is the time in which peaks are searched. If `past` is given, no queries for the
    past are sent. `profile` selects the rules, and thereby the queries.
    """

    selector: str
    names: LabelMap
    window_s: float
    at_s: float | None = None
    lookback_s: float = WEEK_S
    past: Past | None = None
    profile: Profile = field(default_factory=Profile)

    @property
    def covered(self) -> Coverage:
        """The rules to evaluate, and the signals that they need."""
        return coverage(self.profile)


def observe(source: PrometheusSource, config: FleetConfig) -> Observed:
    """The state of the fleet at the configured moment. For "now" the clock of the metrics system is
    used.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    started_s, queries_before, retried_before = time.monotonic(), source.asked, source.retried
    clock, log = source.clock(), AnswerLog()
    at_s = clock.server_s if config.at_s is None else config.at_s
    scope = QueryScope(config.selector, config.window_s)
    running = log.samples("presence", source.instant(queries.presence(scope), at_s))
    raw = [s.labels for s in running if s.labels.get("__name__") != RECORDED]
    recorded = [s.labels for s in running if s.labels.get("__name__") == RECORDED]
    shape = shape_of(raw or recorded, config.names)
    scope = scope.for_engines(shape.by, raw)
    moment = QueryMoment(source, log, at_s)
    presence = presence_of(moment, scope, config.names, shape)
    shape, interval_s = presence.shape, presence.interval_s
    if interval_s is not None:
        scope = replace(scope, window_s=range_s(config.window_s, interval_s))
    if not shape.members and not presence.gone:
        raise _no_series_error(source, config)
    keys = {shape.key(labels) for labels in recorded}
    all_recorded = shape.recorded and all(member.key in keys for member in shape.members)
    use_recorded = all_recorded and bool(shape.members)
    values, sources = _signals(moment, scope, shape, config, recorded=use_recorded)
    findings = _findings(moment, scope, shape) if use_recorded else {}
    streaks_s = _streaks(moment, scope, shape, config, interval_s=interval_s, recorded=not raw)
    of_pods = _of_pods(moment, scope, shape, values)
    answers = moment.instants(router_queries())
    shape = of_pods.shape
    past = config.past
    if past is None:
        past = past_of(
            source,
            scope,
            shape,
            config.names.grouping(member.labels for member in shape.members),
            at_s=at_s,
            lookback_s=config.lookback_s,
            recorded_only=not raw,
        )
    skewed = abs(clock.skew_s) > max(SKEW_SHOWN_S, clock.within_s)
    return Observed(
        t_s=at_s,
        source=source.url,
        window_s=scope.window_s,
        shape=shape,
        values=values,
        gpus=of_pods.gpus,
        faulty_gpus=of_pods.faulty_gpus,
        configs=of_pods.configs,
        images=of_pods.images,
        alerts=findings,
        past=past,
        gone=presence.gone,
        loading=presence.loading,
        scaled_to_zero=presence.scaled_to_zero,
        renamed=presence.renamed,
        is_scraping=presence.is_scraping,
        recorded=sources[0],
        raw=sources[1],
        failed=log.failed,
        warnings=tuple(log.warnings),
        skew_s=clock.skew_s if skewed else None,
        load=Load(
            source.asked - queries_before,
            source.retried - retried_before,
            time.monotonic() - started_s,
        ),
        streaks_s=streaks_s,
        scrape_interval_s=interval_s,
        routers=routers_of(
            {key: [(s.labels, s.value) for s in samples] for key, samples in answers.items()}
        ),
    )


Values = dict[Key, dict[str, float]]


def _signals(
    moment: QueryMoment, scope: QueryScope, shape: Shape, config: FleetConfig, *, recorded: bool
) -> tuple[Values, tuple[list[str], list[str]]]:
    """The signals by engine; then the keys of the signals read from recording rules, and the keys
    of those read from raw series."""
    values: Values = {member.key: {} for member in shape.members}
    raw, recorded_keys = queries.raw_queries(scope, config.covered), list[str]()
    if recorded:
        answers = moment.instants(queries.recorded_queries(scope, config.covered))
        for key, samples in answers.items():
            if samples:
                recorded_keys.append(key)
                raw.pop(key, None)
            _spread(values, shape, key, samples)
    for key, samples in moment.instants(raw).items():
        _spread(values, shape, key, samples)
    return values, (recorded_keys, list(raw))


def _streaks(
    moment: QueryMoment,
    scope: QueryScope,
    shape: Shape,
    config: FleetConfig,
    *,
    interval_s: float | None,
    recorded: bool,
) -> dict[Key, dict[str, float]]:
    """By engine and condition: the minimum seconds for which the condition has held. A condition
    that does not hold is left out."""
    held = queries.held(
        scope, config.profile.targets, interval_s or DEFAULT_SCRAPES_S, recorded_only=recorded
    )
    by_text = {f"{name} for {for_s:g} s": (name, for_s) for name, for_s in held}
    answers = moment.instants({text: held[key] for text, key in by_text.items()})
    streaks_s: dict[Key, dict[str, float]] = {}
    for text, samples in answers.items():
        name, for_s = by_text[text]
        for sample in samples:
            by_name = streaks_s.setdefault(shape.key(sample.labels), {})
            by_name[name] = max(by_name.get(name, 0.0), for_s)
    return streaks_s


def _findings(
    moment: QueryMoment, scope: QueryScope, shape: Shape
) -> dict[Key, dict[str, Severity]]:
    """The severities of findings that the exported rules report now, by engine and rule."""
    severities: dict[Key, dict[str, Severity]] = {}
    answers = moment.instants({"findings": queries.findings(scope)})
    for sample in answers["findings"]:
        by_rule = severities.setdefault(shape.key(sample.labels), {})
        by_rule[sample.labels.get("rule", "")] = Severity(int(sample.value))
    return severities


class _OfPods(NamedTuple):
    """The results of queries by pod, process and GPU: the shape with tiers and, by engine, GPU
    signals, GPUs with an XID, cache configurations and vLLM images."""

    shape: Shape
    gpus: Values
    faulty_gpus: dict[Key, tuple[GpuState, ...]]
    configs: dict[Key, Labels]
    images: dict[Key, str]


def _of_pods(moment: QueryMoment, scope: QueryScope, shape: Shape, values: Values) -> _OfPods:
    """Query the data of pods, processes and GPUs.

    Adds process ages, hourly signals and KV capacities to `values`.
    """
    extra_queries = {
        **queries.process_queries(scope),
        "kv_capacity_tokens": queries.configs(scope),
        **queries.gpu_queries(scope),
        "images": queries.IMAGES,
    }
    answers = moment.instants(extra_queries)
    for hour in ("running_hour_avg", "running_hour_max", "running_hour_ago"):
        _spread(values, shape, hour, answers[hour])
    _by_process(values, shape, "age_s", answers["age_s"])
    configs = _configs(shape, answers["kv_capacity_tokens"])
    for key, labels in configs.items():
        tokens = capacity_tokens(labels)
        if tokens is not None:
            values[key]["kv_capacity_tokens"] = tokens
    of_gpus = {key: answers[key] for key in (*queries.GPUS, queries.COUNTED, *XIDS)}
    shape, gpus, faulty_gpus = with_gpus(shape, of_gpus)
    images = images_of(shape.members, answers["images"])
    return _OfPods(shape, gpus, faulty_gpus, configs, images)


def _spread(values: Values, shape: Shape, key: str, samples: Sequence[Sample]) -> None:
    for sample in samples:
        engine = values.get(shape.key(sample.labels))
        if engine is not None and sample.value == sample.value:
            engine[key] = sample.value


def _by_process(values: Values, shape: Shape, key: str, samples: Sequence[Sample]) -> None:
    """Copy a value to all engines of a metrics page. The page reports such a value only once."""
    names = [name for name in shape.by if name not in ("model_name", "engine")]
    value_by_labels = {tuple(s.labels.get(name, "") for name in names): s.value for s in samples}
    for member in shape.members:
        value = value_by_labels.get(tuple(member.labels.get(name, "") for name in names))
        if value is not None:
            values[member.key][key] = value


def _configs(shape: Shape, samples: Sequence[Sample]) -> dict[Key, Labels]:
    """The labels of cache_config_info by engine; its series have no model label."""
    names = [name for name in shape.by if name != "model_name"]
    labels_by_engine = {tuple(s.labels.get(name, "") for name in names): s.labels for s in samples}
    configs = {
        member.key: labels_by_engine.get(tuple(member.labels.get(name, "") for name in names))
        for member in shape.members
    }
    return kv_pools({key: labels for key, labels in configs.items() if labels}, shape.members)


def capacity_tokens(labels: Mapping[str, str]) -> float | None:
    """The number of tokens that fit a KV cache, from the labels of cache_config_info. None if
    unknown."""
    for names in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        texts = [labels.get(name, "") for name in names]
        if all(text.isdecimal() for text in texts):
            product = 1
            for text in texts:
                product *= int(text)
            return float(product) if product else None
    return None


def _no_series_error(source: PrometheusSource, config: FleetConfig) -> CollectError:
    matching = f" that match {config.selector}" if config.selector else ""
    return CollectError(
        f"{source.url}: no series of vLLM servers{matching} (…{queries.PRESENCE})",
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
        label_map(settings["fleet.labels"] or {}, settings.origin("fleet.labels")),
        settings["window_s"],
        at_s,
        settings["fleet.lookback_s"],
        profile=settings.profile(),
    )


def diagnose_fleet(
    url: str, settings: Settings, selector: str, *, at_s: float | None
) -> FleetDiagnosis:
    """The diagnosis of the fleet that the metrics system at `url` scrapes, now or at a moment.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    profile = settings.profile(stated=stated(settings))
    config = fleet_config(settings, selector, at_s=at_s)
    with PrometheusSource(url, source_settings(settings)) as source:
        return diagnose(observe(source, config), profile)
