"""Recording and alerting rules, and the plan that they are exported for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.signals.expr import Dialect
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import DEFAULTS, GROUPS
from kneewatch.rules.facts import range_s

LABELS = (
    "cluster",
    "namespace",
    "job",
    "pod",
    "instance",
    "tier",
    "model_name",
    "engine",
)
"""Labels that keep engines apart, and those by which people find them; absent ones do no harm."""

POOL_LABELS = tuple(dict.fromkeys(("job", *(name for part in GROUPS for name in DEFAULTS[part]))))
"""Labels that tell tiers, models and pools apart, never those of one engine; absent ones do no
harm."""


@dataclass(frozen=True, slots=True)
class Plan(Profile):
    """What rules are made for: a profile, and where its series come from.

    `interval_s` is the evaluation interval, `scrape_s` that of the scrapes. `objective_ratio` of
    the requests must meet the targets. `prefix` begins vLLM's metric names. `triage_url` is where
    the triage page of a target is: its `instance` is put behind it. `grafana_url` is the
    base of Grafana's pages, `docs_url` that of the pages about causes and rules.
    `gpu_join` has the engine's labels, and those of DCGM's series that say the same: without it no
    GPU is an engine's. `gpu_selector` restricts DCGM's. `ordered`: a rule sees what those before it
    recorded at the same moment; vmalert's do not. `lean`: causes, stages and targets only, without
    findings and without series that no alert reads.
    """

    interval_s: float = 15.0
    scrape_s: float = 15.0
    objective_ratio: float = 0.99
    labels: tuple[str, ...] = LABELS
    prefix: str = VLLM_PREFIX
    selector: str = ""
    triage_url: str = ""
    grafana_url: str = ""
    docs_url: str = ""
    gpu_join: tuple[tuple[str, str], ...] = ()
    gpu_selector: str = ""
    ordered: bool = True
    lean: bool = False

    @property
    def range_s(self) -> float:
        """The window that rules look back on: the stated one, and four scrapes at least."""
        return range_s(self.window_s, self.scrape_s)

    def serves(self, fixed_s: float) -> bool:
        """Whether a range of a fixed length holds four scrapes."""
        return range_s(fixed_s, self.scrape_s) <= fixed_s

    @property
    def sample_s(self) -> float:
        """Seconds between two values of a recorded series that can differ."""
        return max(self.scrape_s, self.interval_s)

    @property
    def settles_s(self) -> float:
        """Seconds that an alert waits if it is not critical, or if a cause may cover it: by then
        two scrapes have shown whether it gets worse, and which cause it is."""
        return max(self.window_s, 2 * self.scrape_s)

    @property
    def runbooks(self) -> str:
        """The base of the pages about causes and rules: as stated, else the daemon's own; empty
        where neither is known."""
        if self.docs_url or not self.triage_url:
            return self.docs_url
        return f"{self.triage_url.rstrip('/').removesuffix('/triage')}/docs"

    @property
    def dialect(self) -> Dialect:
        """How series are spelled."""
        return Dialect(self.range_s, self.labels, self.selector, {}, self.prefix)

    @property
    def engine(self) -> str:
        """The labels of an engine, for `by` and `on`."""
        return ", ".join(self.labels)

    @property
    def pool(self) -> str:
        """The labels that peers have in common."""
        return ", ".join(self.pool_labels)

    @property
    def pool_labels(self) -> tuple[str, ...]:
        """The labels that peers have in common."""
        return tuple(label for label in self.labels if label in POOL_LABELS)

    @property
    def replica(self) -> str:
        """The labels that a replica's engines share, including those of its pool."""
        return ", ".join(label for label in self.labels if label != "engine")

    @property
    def process(self) -> str:
        """The labels of a process: what all its engines share."""
        return ", ".join(label for label in self.labels if label not in ("model_name", "engine"))


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule; `keep_s` is how long it goes on firing after its expression has ended, `by`
    are the labels of its subject where that matters for keeping it."""

    name: str
    expr: str
    for_s: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    keep_s: float = 0.0
    by: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after the other: later ones see what earlier ones recorded.

    `interval_s` is how often, where that is not the plan's.
    """

    name: str
    rules: tuple[Record | Alert, ...]
    interval_s: float | None = None
