"""A fleet at one moment, from Prometheus: replicas, GPUs, KV pools. I/O edge."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kneewatch.agent.fleet import queries
from kneewatch.agent.fleet.history import past_of
from kneewatch.agent.fleet.queries import COUNTED, GPUS, Asking
from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_resolver import BLOCKS, own_blocks
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import Answer, Sample
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.engine_state import Coverage, coverage
from kneewatch.diagnose.fleet.inventory import Key, LabelMap, Labels, Member, Shape, shape_of
from kneewatch.diagnose.fleet.observed import WEEK_S, Gone, Load, Observed, Past
from kneewatch.rules.rule import WORDS, Severity

MODEL = ("modelName", "model_name")
NODE = ("Hostname", "hostname", "node")
Place = tuple[str, ...]


def joined(
    shape: Shape, answers: Mapping[str, Sequence[Sample]]
) -> tuple[Shape, dict[Key, dict[str, float]]]:
    """The shape with the GPU's model as tier where no label names one, and figures by engine.

    `gpus` is among the figures where DCGM says which pod has them: of a node they may be others'.
    """
    by_place: dict[Place, dict[str, float]] = {}
    models: dict[Place, set[str]] = {}
    for key, samples in answers.items():
        fold = min if GPUS.get(key, ("max",))[0] == "min" else max
        for sample in samples:
            for place in places(sample.labels):
                if key == COUNTED and place[0] != "pod":
                    continue
                figures = by_place.setdefault(place, {})
                figures[key] = fold(figures.get(key, sample.value), sample.value)
                if model := next((sample.labels[n] for n in MODEL if sample.labels.get(n)), ""):
                    models.setdefault(place, set()).add(model)
    members: list[Member] = []
    found: dict[Key, dict[str, float]] = {}
    for member in shape.members:
        at = next((one for one in places_of(member) if one in by_place), None)
        if at is None:
            members.append(member)
            continue
        found[member.key] = by_place[at]
        kinds = models.get(at, set())
        tier = member.tier or (next(iter(kinds)) if len(kinds) == 1 else "")
        members.append(replace(member, tier=tier))
    return replace(shape, members=tuple(members)), found


def places(labels: Labels) -> Iterable[Place]:
    """Where a GPU is. Without honorLabels the workload's own labels are the exported ones."""
    pod = labels.get("exported_pod") or labels.get("pod", "")
    namespace = labels.get("exported_namespace") or labels.get("namespace", "")
    cluster = labels.get("cluster", "")
    if pod and (labels.get("exported_pod") or "dcgm" not in pod):
        yield "pod", cluster, namespace, pod
    for node in dict.fromkeys(labels[name] for name in NODE if labels.get(name)):
        yield "node", cluster, node


def places_of(member: Member) -> Iterable[Place]:
    """Where the GPUs of an engine may be, the best known first: in its cluster, whose pods and
    nodes others may have by the same names, or where DCGM's series name none."""
    labels = member.labels
    clusters = dict.fromkeys((labels.get("cluster", ""), ""))
    if labels.get("pod"):
        for cluster in clusters:
            yield "pod", cluster, labels.get("namespace", ""), labels["pod"]
    for node in (member.node, labels.get("instance", "").rpartition(":")[0]):
        for cluster in clusters if node else ():
            yield "node", cluster, node


# --- The KV pool of each engine of a fleet --------------------------------------------------------


def own_pools(configs: Mapping[Key, Labels], members: Sequence[Member]) -> dict[Key, Labels]:
    """The labels of cache_config_info with each engine's own blocks, where a replica shows the sum
    over all of its engines."""
    beside: dict[tuple[str, str, str], list[Key]] = {}
    for member in members:
        if member.key in configs:
            at = member.pool, member.replica, member.model
            beside.setdefault(at, []).append(member.key)
    found = dict(configs)
    for keys in beside.values():
        blocks = own_blocks([configs[key] for key in keys])
        if blocks is not None:
            found |= {key: {**configs[key], BLOCKS: blocks} for key in keys}
    return found


# --- Which series come from scrapes that fail -----------------------------------------------------


class Failing:
    """The scrapes that fail, by the labels of `up`; series of a page are in it or not.

    A job and an address may be there once in each cluster: all labels that both have must agree.
    `up` has none of the page's own.
    """

    def __init__(self, ups: Iterable[Labels]) -> None:
        self._ups: dict[tuple[str, str], list[Labels]] = {}
        for labels in ups:
            self._ups.setdefault(_scrape(labels), []).append(labels)

    def __contains__(self, labels: Labels) -> bool:
        """Whether the scrape of such a series fails."""
        return any(_agree(up, labels) for up in self._ups.get(_scrape(labels), ()))


def _scrape(labels: Labels) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _agree(up: Labels, labels: Labels) -> bool:
    return all(labels.get(name, value) == value for name, value in up.items() if name != "__name__")


# --- A fleet as a metrics system shows it at one moment. I/O edge ---------------------------------


SKEW_SHOWN_S = 1.0
RECORDED = "kneewatch:running"


@dataclass(slots=True)
class Told:
    """Answers as they come: what warned and what failed is kept."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def samples(self, key: str, answer: Answer | CollectError) -> Sequence[Sample]:
        """An answer's samples; none where there is none."""
        if isinstance(answer, CollectError):
            self.failed[key] = str(answer)
            return ()
        self.warnings.update(dict.fromkeys(answer.warnings))
        return answer.samples


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What to look at: matchers, what labels mean, the window, the moment (None: now), and how far
    back for peaks.

    `past`, where given, is taken as it is: that of a while ago stands for days. `profile` says
    which rules are judged, and so what is asked for.
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
        """The rules that are judged, and the signals that they need."""
        return coverage(self.profile)


def observe(source: PrometheusSource, wanted: FleetConfig) -> Observed:
    """What the metrics system says of a fleet now, by its own clock.

    Raises:
        CollectError: it does not answer, or knows no vLLM server.
    """
    started_s, asked, retried = time.monotonic(), source.asked, source.retried
    clock, told = source.clock(), Told()
    at_s = clock.server_s if wanted.at_s is None else wanted.at_s
    asking = Asking(wanted.selector, wanted.window_s)
    found = told.samples("presence", source.instant(queries.presence(asking), at_s))
    raw = [s.labels for s in found if s.labels.get("__name__") != RECORDED]
    recorded = [s.labels for s in found if s.labels.get("__name__") == RECORDED]
    shape = shape_of(raw or recorded, wanted.names)
    asking = asking.about(shape.by, raw)
    shape, gone = _standing(source, asking, wanted.names, shape, told, at_s)
    if not shape.members and not gone:
        raise _nothing(source, wanted)
    keys = {shape.key(labels) for labels in recorded}
    covered = shape.recorded and all(member.key in keys for member in shape.members)
    kept = covered and bool(shape.members)
    values, sources = _signals(source, asking, shape, told, at_s, wanted, recorded=kept)
    fires = _alerts(source, asking, shape, told, at_s) if kept else {}
    shape, gpus, configs = _beside(source, asking, shape, told, at_s, values)
    past = wanted.past
    if past is None:
        past = past_of(
            source,
            asking,
            shape,
            wanted.names.grouping(member.labels for member in shape.members),
            at_s=at_s,
            lookback_s=wanted.lookback_s,
            recorded_only=not raw,
        )
    skewed = abs(clock.skew_s) > max(SKEW_SHOWN_S, clock.within_s)
    return Observed(
        t_s=at_s,
        source=source.url,
        window_s=wanted.window_s,
        shape=shape,
        values=values,
        gpus=gpus,
        configs=configs,
        alerts=fires,
        past=past,
        gone=gone,
        recorded=sources[0],
        raw=sources[1],
        failed=told.failed,
        warnings=tuple(told.warnings),
        skew_s=clock.skew_s if skewed else None,
        load=Load(source.asked - asked, source.retried - retried, time.monotonic() - started_s),
    )


Values = dict[Key, dict[str, float]]


def _signals(
    source: PrometheusSource,
    asking: Asking,
    shape: Shape,
    told: Told,
    at_s: float,
    wanted: FleetConfig,
    *,
    recorded: bool,
) -> tuple[Values, tuple[list[str], list[str]]]:
    """Signals by engine, and which of them recording rules gave and which raw series."""
    values: Values = {member.key: {} for member in shape.members}
    raw, kept = queries.raw_queries(asking, wanted.covered), list[str]()
    if recorded:
        answers = source.instants(queries.recorded_queries(asking, wanted.covered), at_s)
        for key, answer in answers.items():
            samples = told.samples(key, answer)
            if samples:
                kept.append(key)
                raw.pop(key, None)
            _spread(values, shape, key, samples)
    for key, answer in source.instants(raw, at_s).items():
        _spread(values, shape, key, told.samples(key, answer))
    return values, (kept, list(raw))


def _alerts(
    source: PrometheusSource, asking: Asking, shape: Shape, told: Told, at_s: float
) -> dict[Key, dict[str, Severity]]:
    """The worst severity at which each rule fires, by engine and rule."""
    fires: dict[Key, dict[str, Severity]] = {}
    words = {word: severity for severity, word in WORDS.items()}
    answers = source.instants({"alerts": queries.alerts(asking)}, at_s)
    for sample in told.samples("alerts", answers["alerts"]):
        rule, severity = sample.labels.get("rule", ""), words.get(sample.labels.get("severity", ""))
        if severity is not None:
            by_rule = fires.setdefault(shape.key(sample.labels), {})
            by_rule[rule] = max(severity, by_rule.get(rule, severity))
    return fires


def _beside(
    source: PrometheusSource,
    asking: Asking,
    shape: Shape,
    told: Told,
    at_s: float,
    values: Values,
) -> tuple[Shape, Values, dict[Key, Labels]]:
    """The shape with tiers, GPU figures and configurations by engine; ages, hours and capacities go
    to `values`."""
    wanted = {
        **queries.beside(asking),
        "kv_capacity_tokens": queries.configs(asking),
        **queries.gpu_queries(asking.selector),
    }
    answers = {
        key: told.samples(key, answer) for key, answer in source.instants(wanted, at_s).items()
    }
    for hour in ("running_hour_avg", "running_hour_max", "running_hour_ago"):
        _spread(values, shape, hour, answers[hour])
    _by_process(values, shape, "age_s", answers["age_s"])
    configs = _configs(shape, answers["kv_capacity_tokens"])
    for key, labels in configs.items():
        tokens = capacity_tokens(labels)
        if tokens is not None:
            values[key]["kv_capacity_tokens"] = tokens
    shape, gpus = joined(shape, {key: answers[key] for key in (*queries.GPUS, queries.COUNTED)})
    return shape, gpus, configs


def _spread(values: Values, shape: Shape, key: str, samples: Sequence[Sample]) -> None:
    for sample in samples:
        engine = values.get(shape.key(sample.labels))
        if engine is not None and sample.value == sample.value:
            engine[key] = sample.value


def _by_process(values: Values, shape: Shape, key: str, samples: Sequence[Sample]) -> None:
    """What a page says once for all its engines."""
    names = [one for one in shape.by if one not in ("model_name", "engine")]
    told = {tuple(s.labels.get(one, "") for one in names): s.value for s in samples}
    for member in shape.members:
        value = told.get(tuple(member.labels.get(one, "") for one in names))
        if value is not None:
            values[member.key][key] = value


def _configs(shape: Shape, samples: Sequence[Sample]) -> dict[Key, Labels]:
    """The labels of cache_config_info by engine; they have no model."""
    names = [one for one in shape.by if one != "model_name"]
    told = {tuple(s.labels.get(one, "") for one in names): s.labels for s in samples}
    found = {
        member.key: told.get(tuple(member.labels.get(one, "") for one in names))
        for member in shape.members
    }
    return own_pools({key: labels for key, labels in found.items() if labels}, shape.members)


def capacity_tokens(labels: Mapping[str, str]) -> float | None:
    """Tokens that a KV cache holds, by the labels of cache_config_info."""
    for names in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        texts = [labels.get(name, "") for name in names]
        if all(text.isdecimal() for text in texts):
            product = 1
            for text in texts:
                product *= int(text)
            return float(product) if product else None
    return None


def _standing(
    source: PrometheusSource,
    asking: Asking,
    names: LabelMap,
    shape: Shape,
    told: Told,
    at_s: float,
) -> tuple[Shape, list[Gone]]:
    """The shape of what is up, and the replicas of the last hour that are not.

    Where a scrape fails old values may still be served for minutes: they are not the present.
    """
    asked = {"vanished": queries.vanished(asking), "up": queries.scrapes_failing(asking)}
    answers = {
        key: told.samples(key, answer) for key, answer in source.instants(asked, at_s).items()
    }
    failing = Failing(sample.labels for sample in answers["up"])
    vanished = shape_of((sample.labels for sample in answers["vanished"]), names)
    left = [member for member in shape.members if member.labels not in failing]
    standing = {(member.replica, member.pool) for member in left}
    gone: dict[tuple[str, str], Gone] = {}
    for member in (*vanished.members, *shape.members):
        name, down = (member.replica, member.pool), member.labels in failing
        if name not in standing:
            gone[name] = Gone(*name, down or (name in gone and gone[name].down))
    return replace(shape, members=tuple(left)), list(gone.values())


def _nothing(source: PrometheusSource, wanted: FleetConfig) -> CollectError:
    matching = f" that match {wanted.selector}" if wanted.selector else ""
    return CollectError(
        f"{source.url}: it has no series of vLLM servers{matching} (…{queries.PRESENCE})",
        kind="no_vllm",
        hint="does it scrape vLLM's /metrics? check --selector; Mimir and Cortex want a tenant: "
        "--header X-Scope-OrgID=TENANT",
    )
