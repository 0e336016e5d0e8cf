"""The recommendations of one engine over time: made for its causes, held while they hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kneewatch.diagnose.case import Cause, Facts
from kneewatch.diagnose.causes import BY_ID
from kneewatch.diagnose.recommend import levers_budget as budget
from kneewatch.diagnose.recommend import levers_features as features
from kneewatch.diagnose.recommend import levers_fleet as fleet
from kneewatch.diagnose.recommend import levers_kv as kv
from kneewatch.diagnose.recommend import levers_load as load
from kneewatch.diagnose.recommend import levers_prefill as prefill
from kneewatch.diagnose.recommend import levers_reuse as reuse
from kneewatch.diagnose.recommend import levers_scale_down as scale_down
from kneewatch.diagnose.recommend import levers_spec as spec
from kneewatch.diagnose.recommend import levers_split as split
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.deployment import NOTHING, Deployment, Stated, deployment
from kneewatch.diagnose.recommend.harm import harmless
from kneewatch.diagnose.recommend.incident import Incidents
from kneewatch.diagnose.recommend.order import QUEUE_LIMIT, ordered
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import Lever, Scene
from kneewatch.diagnose.recommend.tracker import RecommendationTracker

MOST = 5
"""Levers told for one cause."""

LARGEST_VALUE = 1e18
"""More of anything is a mistake of the page."""

MOVED = 1.25
"""A load that has moved by this much is computed anew; less would only make numbers flicker."""

SLACK = (2.0, 0.5)
"""Requests, and requests a second, that are no movement however small the load is."""

LEVERS: Mapping[str, Lever] = {
    lever.__name__: lever
    for lever in (
        budget.kv_blocks,
        budget.kv_memory_bytes,
        kv.kv_fp8,
        kv.gpu_memory_utilization,
        load.more_seqs,
        load.fewer_seqs,
        load.queue_limit,
        load.max_model_len,
        fleet.more_replicas,
        fleet.tensor_parallel,
        prefill.prefix_caching,
        prefill.chunked_prefill,
        prefill.smaller_budget,
        prefill.long_prefill_threshold,
        prefill.disaggregation,
        prefill.fp8_weights,
        reuse.prompt_order,
        reuse.sticky_routing,
        reuse.transfer_path,
        spec.shorter_draft,
        spec.no_speculation,
        features.more_adapter_slots,
        features.adapter_routing,
        features.output_cap,
        scale_down.fewer_replicas,
        split.lower_tensor_parallel,
    )
}
"""Every change that can be recommended, by the name that causes list it under (`levers`)."""


def recommend(
    facts: Facts,
    causes: Sequence[str],
    server: Deployment,
    incidents: Incidents | None = None,
    *,
    weekly_peak_requests: float | None = None,
) -> list[Recommendation]:
    """Every lever against these causes (ids) that does no harm, by cause and then best first.

    A lever that answers two causes is told for the first of them. Sizes are for the peak of each
    cause in `incidents`; fewer replicas are for `weekly_peak_requests`, and none without it.
    """
    seen = Incidents() if incidents is None else incidents
    if not sum(map(abs, filter(None, facts.values.values()))) < LARGEST_VALUE:
        # A page may say +Inf or nonsense: no number to compute with.
        plain = {
            key: value if value is not None and abs(value) < LARGEST_VALUE else None
            for key, value in facts.values.items()
        }
        facts = replace(facts, values=plain)
    wanted = demand(facts.values, server)
    told: dict[str, Recommendation] = {}
    for cause in causes:
        scene = Scene(
            cause,
            facts,
            server,
            seen.peak(cause, wanted),
            weekly_peak_requests=weekly_peak_requests,
        )
        found: list[Recommendation] = []
        for name in BY_ID[cause].levers:
            made = LEVERS[name](scene)
            made = None if made is None else harmless(made, scene)
            if made is not None and made.id not in told:
                found.append(seen.grown(made))
        told.update({made.id: made for made in ordered(found, scene)[:MOST]})
    return list(told.values())


class Adviser:
    """One engine's recommendations. What is told stays while causes and load are the same.

    `weekly_peak_requests` is for whoever has watched a week to fill in: the most requests that ran
    or waited on this engine at once. Without it no replica is advised away.
    """

    def __init__(self, stated: Stated = NOTHING) -> None:
        self.weekly_peak_requests: float | None = None
        self._stated = stated
        self._tracker = RecommendationTracker()
        self._config: Mapping[str, str] | None = None
        self._server = Deployment(stated=stated)
        self._causes: tuple[str, ...] = ()
        self._load, self._made_s = (0.0, 0.0), float("-inf")
        self._told: tuple[Recommendation, ...] = ()
        self._incidents = Incidents()
        self._restarted = False

    def restarted(self) -> None:
        """The process was replaced: the next page shows what it was started with."""
        self._restarted = True
        self._forget()

    def _forget(self) -> None:
        self._causes, self._told = (), ()
        self._incidents.keep(())

    def advise(self, facts: Facts, causes: Sequence[Cause]) -> tuple[Recommendation, ...]:
        """The recommendations for these causes at this moment."""
        if self._restarted and facts.config:
            self._tracker.restarted(facts.now_s, facts.config, before=self._config)
            self._restarted = False
        named = tuple([cause.id for cause in causes if BY_ID[cause.id].levers])
        if "prefix_churn" in named and not _churn_holds(facts, causes):
            named = tuple([cause for cause in named if cause != "prefix_churn"])
        if not named:
            if self._causes:
                self._forget()
            return ()
        load_now = _load_of(facts)
        fresh = facts.now_s - self._made_s < facts.window_s
        same = named == self._causes and facts.config == self._config
        if same and fresh and not _moved(self._load, load_now):
            return self._told
        if facts.config != self._config:
            self._config = dict(facts.config)
            self._server = deployment(facts.config, self._stated)
        self._causes, self._load, self._made_s = named, load_now, facts.now_s
        self._incidents.keep(named)
        made = recommend(
            facts,
            named,
            self._server,
            self._incidents,
            weekly_peak_requests=self.weekly_peak_requests,
        )
        running = facts.values.get("running_max") or 0.0
        allowed = self._tracker.allowed(facts.now_s, made, requests=load_now[0], running=running)
        told = tuple(_with_others(allowed))
        self._tracker.advised(facts.now_s, told, requests=load_now[0])
        self._told = told
        return told


def _with_others(made: Sequence[Recommendation]) -> list[Recommendation]:
    """Without a queue limit that is all that is told against its cause."""
    others = {one.cause for one in made if one.id != QUEUE_LIMIT}
    return [one for one in made if one.id != QUEUE_LIMIT or one.cause in others]


def _churn_holds(facts: Facts, causes: Sequence[Cause]) -> bool:
    """Whether more KV would help: not where prompts no longer share prefixes, nor at a dip."""
    if any(cause.id == "prefix_reuse_lost" for cause in causes):
        return False
    churn = next(cause for cause in causes if cause.id == "prefix_churn")
    return not facts.now_s - churn.since_s < facts.window_s


def _load_of(facts: Facts) -> tuple[float, float]:
    """What decides whether the numbers are computed anew: requests wanted, requests served."""
    values = facts.values
    wanted = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
    return wanted, values.get("completed_per_s") or 0.0


def _moved(was: tuple[float, float], now: tuple[float, float]) -> bool:
    return any(
        abs(after - before) > slack and not before / MOVED <= after <= before * MOVED
        for before, after, slack in zip(was, now, SLACK, strict=True)
    )
