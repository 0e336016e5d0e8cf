"""Recording and alerting rules, the plan they are exported for, and when an alert fires. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.signals.expr import Dialect
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import DEFAULTS, GROUPS
from kneewatch.rules.facts import duration, number, range_s, recorded
from kneewatch.rules.rule import Severity

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


class Plan(Profile, frozen=True):
    """The profile that rules are made for, and the labels and names of its series.

    `interval_s` is the evaluation interval, `scrape_s` that of the scrapes. `objective_ratio` of
    the requests must meet the targets. `prefix` begins vLLM's metric names. `triage_url` is the
    start of a triage page's address, completed by the target's `instance`. `grafana_url` is the
    base of Grafana's pages, `docs_url` that of the pages about causes and rules. `gpu_join` pairs
    labels of engines with labels of DCGM's series that have the same values: without it no GPU is
    assigned to an engine. `gpu_selector` restricts DCGM's series. `ordered`: a rule sees what
    earlier rules recorded at the same moment, which vmalert's rules do not. `lean`: causes, stages
    and targets only, without findings and without series that no alert reads.
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
        """The labels, range, selector and prefix that PromQL expressions are compiled with."""
        return Dialect(self.range_s, self.labels, self.selector, {}, self.prefix)

    @property
    def engine(self) -> str:
        """The labels of an engine, for `by` and `on`."""
        return ", ".join(self.labels)

    @property
    def pool(self) -> str:
        """The labels that peers have in common, for `by` and `on`."""
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
        """The labels that all engines of one process share."""
        return ", ".join(label for label in self.labels if label not in ("model_name", "engine"))


class Record(Struct, frozen=True):
    """A recording rule."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class Alert(Struct, frozen=True):
    """An alerting rule; `keep_s` is how long it goes on firing after its expression has ended, `by`
    are the labels of its subject, if they are needed to keep it firing."""

    name: str
    expr: str
    for_s: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    keep_s: float = 0.0
    by: str = ""


class Group(Struct, frozen=True):
    """Rules that are evaluated one after the other: later ones see what earlier ones recorded.

    `interval_s` is the evaluation interval, None for the plan's.
    """

    name: str
    rules: tuple[Record | Alert, ...]
    interval_s: float | None = None


# --- When a condition of an engine counts: after it has held, and for a while after ---------------
#
# A severity (1 info, 2 warning, 3 critical) goes through three series for each engine: since when
# it or a worse one has held, whether it has held for long enough, and what is in force, which stays
# for a while after it has ended. Alerts could wait and stay by themselves (`for`,
# `keep_firing_for`), but a pool has one alert: in a rollout its replicas would complete the wait
# one after the other.


FINDING, CAUSE = recorded("finding"), recorded("cause")
"""What is in force for each engine: the severity of a finding (label `rule`) or of a cause (label
`cause`, with the form's name behind a colon where a cause has several)."""

CONFIDENCE, CAUSE_SEVERITY = "cause_confidence", "cause_severity"

WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


class Lasts(NamedTuple):
    """For how long a condition must hold, and how long it then stays in force without holding."""

    for_s: float
    keep_s: float


def met(kind: str) -> str:
    """The series of the severities whose conditions are met at this moment."""
    return f"{kind}_met"


def in_force_records(plan: Plan, kind: str, label: str, lasts: Mapping[str, Lasts]) -> list[Record]:
    """Records of the findings or causes (`kind`) in force, from those whose condition is met, for
    each value of `label`. A finding or cause that is still in force needs no duration when its
    condition is met again."""
    now, since, held = met(kind), f"{kind}_since_s", f"{kind}_held"
    long_enough = " or ".join(
        f'((time() - {since}{{{only}, severity="{severity.word}"}} >= {number(for_s)}) * 0'
        f" + {int(severity)})"
        for for_s, only in _alike(label, {key: last.for_s for key, last in lasts.items()})
        for severity in WORST_FIRST
    )
    again = " or ".join(
        f"((({now} >= {int(severity)}) and {kind} >= {int(severity)}) * 0 + {int(severity)})"
        for severity in WORST_FIRST
    )
    kept = " or ".join(
        # The last evaluation that had it is one before the first that lacks it.
        f"max_over_time({held}{{{only}}}[{duration(keep_s + plan.interval_s / 2)}])"
        if keep_s
        else f"{held}{{{only}}}"
        for keep_s, only in _alike(label, {key: last.keep_s for key, last in lasts.items()})
    )
    return [
        *(_since(now, since, severity) for severity in WORST_FIRST),
        Record(held, f"max without (severity) ({long_enough} or {again})"),
        Record(kind, kept),
    ]


def _since(now: str, since: str, severity: Severity) -> Record:
    """Since when, in Unix seconds, this severity or a worse one has been met."""
    own = {"severity": severity.word}
    before = f'max without (severity) ({since}{{severity="{severity.word}"}})'
    holds = f"({now} >= {int(severity)})"
    return Record(since, f"({before} and {holds}) or ({holds} * 0 + time())", own)


def _alike(label: str, seconds: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Yields each time in seconds with a label matcher for the names that have this time."""
    names: dict[float, list[str]] = defaultdict(list)
    for name, time_s in seconds.items():
        names[time_s].append(name)
    for time_s, alike in names.items():
        yield time_s, f'{label}=~"{"|".join(alike)}"'


# --- One alert for a pool: where it fires, and its text -------------------------------------------
#
# An alert has the labels of its pool alone, so that it stays the same alert while replicas come
# and go. Its annotations ask Prometheus for the rest when they are written.


WHERE = (
    "{{ with $labels.model_name }}{{ . }}{{ else }}the model{{ end }}"
    "{{ with $labels.namespace }} in {{ . }}{{ end }}"
    "{{ with $labels.job }} (job {{ . }}){{ end }}"
)
"""An alert's pool in an annotation: its model, namespace and job."""

WORST_NAME = '{{ with label "pod" $worst }}{{ . }}{{ else }}{{ label "instance" $worst }}{{ end }}'


def firing(plan: Plan, in_force: str, severity: Severity) -> str:
    """The number of affected replicas of a pool, in pools where the worst severity is `severity`.

    `in_force` is an expression for the severity of each engine. Alerts of severity `info` count all
    affected replicas, others those at `warning` or worse.
    """
    least = min(severity, Severity.WARNING)
    worst = f"(max by ({plan.pool}) ({in_force}) == {int(severity)})"
    return f"{affected(plan, f'{in_force} >= {int(least)}')} and on ({plan.pool}) {worst}"


def affected(plan: Plan, engines: str) -> str:
    """The number of replicas of each pool that have one of these engines."""
    return f"count by ({plan.pool}) (max by ({plan.replica}) ({engines}))"


def count_text(plan: Plan, *, also: str = "") -> str:
    """The number of affected replicas of the pool, as a template: "5 of 8 replicas of llama in
    chat". `also` is a series of replicas that are not scraped."""
    of_pool = "{%s}"
    seen = recorded("running") + of_pool + (f" or {also}{of_pool}" if also else "")
    pools = "$pool $pool" if also else "$pool"
    query = f'printf "count(count by ({plan.replica}) ({seen}))" {pools}'
    total = f"{{{{ with {query} | query }}}} of {{{{ . | first | value }}}}{{{{ end }}}}"
    return f'{_pool(plan)}{{{{ printf "%.0f" $value }}}}{total} replicas of {WHERE}'


def worst_text(plan: Plan, query: str, text: str) -> str:
    """A template about the replica that a query finds, as `$worst`; empty where it finds none.

    `query` has POOL for the pool's matchers, and no other percent sign.
    """
    pools = " ".join(["$pool"] * query.count(POOL))
    escaped = query.replace('"', r"\"").replace(POOL, "%s")
    query = f'printf "{escaped}" {pools}'
    return (
        f"{_pool(plan)}{{{{ with {query} | query }}}}{{{{ $worst := first . }}}}{text}{{{{ end }}}}"
    )


POOL = "%POOL%"
"""In a query of `worst_text`: the matchers of the alert's pool."""


def _pool(plan: Plan) -> str:
    """The matchers of the alert's pool as the template's variable `$pool`."""
    matchers = ",".join(f"{label}=%q" for label in plan.pool_labels)
    values = " ".join(f"$labels.{label}" for label in plan.pool_labels)
    return f'{{{{ $pool := printf "{matchers}" {values} }}}}'
