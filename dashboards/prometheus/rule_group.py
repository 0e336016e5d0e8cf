"""Recording and alerting rules, the plan from which they are made, and the conditions under which
an alert fires. Pure."""

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
"""Labels that distinguish engines, and labels by which people find engines. A label that does not
exist does no harm."""

POOL_LABELS = tuple(dict.fromkeys(("job", *(name for part in GROUPS for name in DEFAULTS[part]))))
"""Labels that distinguish tiers, models and pools, but not the engines of a pool. A label that does
not exist does no harm."""


class Plan(Profile, frozen=True):
    """The profile for which rules are made, and the labels and names of their series.

    `interval_s` is the evaluation interval, `scrape_s` the scrape interval. `objective_ratio` is
    the share of requests that must meet the targets. `prefix` is the prefix of vLLM's metric names.

    `triage_url` is the start of a triage page's address; a target's `instance` is appended.
    `grafana_url` is the base address of Grafana's pages, `docs_url` that of the pages about causes
    and rules.

    `gpu_join` has pairs of a label of engines and a label of DCGM's series that have equal values.
    Without it, no GPU is assigned to an engine. `gpu_selector` restricts DCGM's series.

    `ordered`: a rule sees what earlier rules recorded at the same moment; vmalert's rules do not.
    `lean`: only causes, stages and targets. Findings, and series that no alert reads, are left out.
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
        """The range over which rules look back, in seconds: the configured window, but at least
        four scrapes."""
        return range_s(self.window_s, self.scrape_s)

    def serves(self, fixed_s: float) -> bool:
        """Whether a range of `fixed_s` seconds contains at least four scrapes."""
        return range_s(fixed_s, self.scrape_s) <= fixed_s

    @property
    def sample_s(self) -> float:
        """Minimum seconds after which a recorded series can have a different value."""
        return max(self.scrape_s, self.interval_s)

    @property
    def settles_s(self) -> float:
        """Seconds that an alert waits before it fires. It waits if it is not critical, or if a
        cause may cover it. In this time, two scrapes show whether the problem gets worse, and which
        cause it has."""
        return max(self.window_s, 2 * self.scrape_s)

    @property
    def runbooks(self) -> str:
        """The base address of the pages about causes and rules: `docs_url`, else the daemon's own
        pages. Empty if neither address is known."""
        if self.docs_url or not self.triage_url:
            return self.docs_url
        return f"{self.triage_url.rstrip('/').removesuffix('/triage')}/docs"

    @property
    def dialect(self) -> Dialect:
        """The dialect for compiling PromQL expressions: labels, range, selector and prefix."""
        return Dialect(self.range_s, self.labels, self.selector, {}, self.prefix)

    @property
    def engine(self) -> str:
        """The labels of an engine, joined to a text for `by` and `on`."""
        return ", ".join(self.labels)

    @property
    def pool(self) -> str:
        """The labels that all peers of an engine share, joined to a text for `by` and `on`."""
        return ", ".join(self.pool_labels)

    @property
    def pool_labels(self) -> tuple[str, ...]:
        """The labels that all peers of an engine share."""
        return tuple(label for label in self.labels if label in POOL_LABELS)

    @property
    def replica(self) -> str:
        """The labels that all engines of a replica share, joined to a text. Includes the labels of
        its pool."""
        return ", ".join(label for label in self.labels if label != "engine")

    @property
    def process(self) -> str:
        """The labels that all engines of a process share, joined to a text."""
        return ", ".join(label for label in self.labels if label not in ("model_name", "engine"))


class Record(Struct, frozen=True):
    """A recording rule."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class Alert(Struct, frozen=True):
    """An alerting rule. `keep_s` is how many seconds it keeps firing after its condition has ended.
    `by` are the labels of its subject; they are set only if needed to keep the alert firing."""

    name: str
    expr: str
    for_s: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    keep_s: float = 0.0
    by: str = ""


class Group(Struct, frozen=True):
    """Rules that are evaluated one after the other: a rule sees what earlier ones recorded.

    `interval_s` is the evaluation interval in seconds; None for that of the plan.
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
"""Names of recorded series about what is active on each engine: the severity of a finding (label
`rule`) and of a cause (label `cause`). If a cause has several forms, the label has the form
`CAUSE:FORM`."""

CONFIDENCE, CAUSE_SEVERITY = "cause_confidence", "cause_severity"

WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


class Lasts(NamedTuple):
    """The seconds for which a condition must hold to become active, and the seconds for which it
    then stays active without holding."""

    for_s: float
    keep_s: float


def met(kind: str) -> str:
    """The name of the recorded series with the severities whose conditions hold at this moment."""
    return f"{kind}_met"


def in_force_records(plan: Plan, kind: str, label: str, lasts: Mapping[str, Lasts]) -> list[Record]:
    """Recording rules for the active findings or causes (`kind`), for each value of `label`.

    They read the series of conditions that hold (`met`). A condition must normally hold for some
    time. If it returns while its finding or cause is still active, it counts at once.
    """
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
    """The recording rule for the start of a condition: the Unix time since which the condition for
    this severity, or for a worse one, has held."""
    own = {"severity": severity.word}
    before = f'max without (severity) ({since}{{severity="{severity.word}"}})'
    holds = f"({now} >= {int(severity)})"
    return Record(since, f"({before} and {holds}) or ({holds} * 0 + time())", own)


def _alike(label: str, seconds: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Yields each different time in `seconds`, with a label matcher for all names that have this
    time."""
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
"""A template for the pool of an alert: its model, namespace and job."""

WORST_NAME = '{{ with label "pod" $worst }}{{ . }}{{ else }}{{ label "instance" $worst }}{{ end }}'


def firing(plan: Plan, in_force: str, severity: Severity) -> str:
    """A PromQL expression for the number of affected replicas of a pool. It has a value for pools
    in which the worst severity is `severity`.

    `in_force` is an expression for the severity of each engine. An alert at `info` counts all
    affected replicas; other alerts count only replicas at `warning` or worse.
    """
    least = min(severity, Severity.WARNING)
    worst = f"(max by ({plan.pool}) ({in_force}) == {int(severity)})"
    return f"{affected(plan, f'{in_force} >= {int(least)}')} and on ({plan.pool}) {worst}"


def affected(plan: Plan, engines: str) -> str:
    """A PromQL expression for the number of replicas of each pool that have at least one of these
    engines."""
    return f"count by ({plan.pool}) (max by ({plan.replica}) ({engines}))"


def count_text(plan: Plan, *, also: str = "") -> str:
    """A template for the number of affected replicas of the pool, such as "5 of 8 replicas of llama
    in chat". `also` is a series with replicas that are not scraped."""
    of_pool = "{%s}"
    seen = recorded("running") + of_pool + (f" or {also}{of_pool}" if also else "")
    pools = "$pool $pool" if also else "$pool"
    query = f'printf "count(count by ({plan.replica}) ({seen}))" {pools}'
    total = f"{{{{ with {query} | query }}}} of {{{{ . | first | value }}}}{{{{ end }}}}"
    return f'{_pool(plan)}{{{{ printf "%.0f" $value }}}}{total} replicas of {WHERE}'


def worst_text(plan: Plan, query: str, text: str) -> str:
    """A template for a text about the replica that `query` finds. `text` can refer to the replica
    as `$worst`. The result is empty if no replica is found.

    `query` contains POOL in place of the pool's matchers, and no other percent sign.
    """
    pools = " ".join(["$pool"] * query.count(POOL))
    escaped = query.replace('"', r"\"").replace(POOL, "%s")
    query = f'printf "{escaped}" {pools}'
    return (
        f"{_pool(plan)}{{{{ with {query} | query }}}}{{{{ $worst := first . }}}}{text}{{{{ end }}}}"
    )


POOL = "%POOL%"
"""A placeholder in the query of `worst_text` for the matchers of the alert's pool."""


def _pool(plan: Plan) -> str:
    """A template that sets the variable `$pool` to the matchers of the alert's pool."""
    matchers = ",".join(f"{label}=%q" for label in plan.pool_labels)
    values = " ".join(f"$labels.{label}" for label in plan.pool_labels)
    return f'{{{{ $pool := printf "{matchers}" {values} }}}}'
