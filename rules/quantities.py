"""The quantities and conditions for records: signals, baselines, targets, durations. Pure."""

from __future__ import annotations

from msgspec import Struct

from kneewatch.rules.conditions import (
    Clause,
    Compare,
    Condition,
    Leaf,
    Number,
    Quantity,
    Scope,
    nodes,
)
from kneewatch.rules.facts import EVERYWHERE, Spelling, duration, number, recorded, span_s


class Signal(Quantity, Struct, frozen=True):
    """A signal or derived signal over the window."""

    key: str

    def source(self, scope: Scope) -> str:
        return scope.signal(self.key)

    def promql(self, to: Spelling) -> str | None:
        return to.series(self.key)


RECENT = {
    "prefix_hit_ratio": "prefix_hit_recent_ratio",
    "prefix_hit_tokens_mean": "prefix_hit_recent_tokens_mean",
    "spec_acceptance_ratio": "spec_acceptance_recent_ratio",
    "lora_change_per_s": "lora_change_recent_per_s",
}
"""Recorded series of the signals that are also read over the newest part of the window."""

RECENT_SHARE = 0.25
RECENT_SCRAPES = 2.2
"""The newest part of the window: a share of it, and at least this many scrape intervals."""

RECENT_REQUESTS_MIN = 4.0
OF_REQUESTS = frozenset({"prefix_hit_ratio", "prefix_hit_tokens_mean"})
"""Signals of RECENT that are meaningless with fewer than RECENT_REQUESTS_MIN requests."""


class Recent(Quantity, Struct, frozen=True):
    """A signal over the newest part of the window."""

    key: str

    def source(self, scope: Scope) -> str:
        return f"facts.recent.get({self.key!r})"

    def promql(self, to: Spelling) -> str | None:
        return to.series(RECENT[self.key])


BASELINES = {"prefix_hit_ratio": "prefix_hit_quiet_ratio"}
"""For signals whose baseline is a derived signal with a name of its own, the key of that signal."""


class BaselineValue(Quantity, Struct, frozen=True):
    """A signal's baseline: its quiet median or the usual value at this hour of the week."""

    key: str

    def source(self, scope: Scope) -> str:
        return f"facts.baseline.get({self.key!r})"

    def promql(self, to: Spelling) -> str | None:
        return to.series(self.name)

    @property
    def name(self) -> str:
        """The key of the baseline's recorded series."""
        return BASELINES.get(self.key, f"{self.key}:baseline")


class UsualValue(Quantity, Struct, frozen=True):
    """A signal's usual value at this hour of the week; unknown until enough weeks agree."""

    key: str

    def source(self, scope: Scope) -> str:
        return f"facts.baseline.usual({self.key!r})"

    def promql(self, to: Spelling) -> str | None:
        return to.series(self.name)

    @property
    def name(self) -> str:
        """The key of the usual value's recorded series."""
        return f"{self.key}:usual"


class Target(Quantity, Struct, frozen=True):
    """A latency target; unknown if not configured."""

    scalar = True
    positive = True

    name: str

    def source(self, scope: Scope) -> str:
        return f"facts.targets.{self.name}"

    def promql(self, to: Spelling) -> str | None:
        target_s: float | None = getattr(to.targets, self.name)
        return None if target_s is None else number(target_s)


class WindowSeconds(Quantity, Struct, frozen=True):
    """The window in seconds: times a rate it gives a count."""

    scalar = True
    positive = True

    share: float = 1.0

    def source(self, scope: Scope) -> str:
        return f"({self.share!r} * facts.window_s)"

    def promql(self, to: Spelling) -> str | None:
        return number(self.share * to.window_s)


class SquareRoot(Quantity, Struct, frozen=True):
    """The square root of a quantity; unknown unless the quantity is above zero."""

    of: Quantity

    def source(self, scope: Scope) -> str:
        value, *checks = scope.checked(self.of)
        return f"({value}**0.5 if {' and '.join([*checks, f'{value} > 0'])} else None)"

    def promql(self, to: Spelling) -> str | None:
        radicand = self.of.promql(to)
        return None if radicand is None else f"sqrt({radicand} > 0)"


class Named(Quantity, Struct, frozen=True):
    """A quantity with its own recording rule in PromQL, because several records use it."""

    key: str
    of: Quantity

    def source(self, scope: Scope) -> str:
        return self.of.source(scope)

    def promql(self, to: Spelling) -> str | None:
        return None if self.of.promql(to) is None else recorded(self.key)


class FirstOf(Quantity, Struct, frozen=True):
    """The first known one of several quantities."""

    options: tuple[Quantity, ...]

    def source(self, scope: Scope) -> str:
        *options, value = [option.source(scope) for option in self.options]
        for option in reversed(options):
            name = scope.variable()
            value = f"({name} if ({name} := {option}) is not None else {value})"
        return value

    def promql(self, to: Spelling) -> str | None:
        options = [text for option in self.options if (text := option.promql(to)) is not None]
        return f"({' or '.join(options)})" if options else None


class Minimum(Quantity, Struct, frozen=True):
    """The smaller of two quantities; if one is unknown, the other one."""

    left: Quantity
    right: Quantity

    def source(self, scope: Scope) -> str:
        left, right = self.left.source(scope), self.right.source(scope)
        return f"{scope.name_of(_smaller)}({left}, {right})"

    def promql(self, to: Spelling) -> str | None:
        left, right = self.left.promql(to), self.right.promql(to)
        if left is None or right is None:
            return right if left is None else left
        return f"({right} <= {left}) or {left} or {right}"


def _smaller(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)


class LastStep(Quantity, Struct, frozen=True):
    """A counter's increase between the last two scrapes; in PromQL its rate between them."""

    metric: str
    key: str

    def source(self, scope: Scope) -> str:
        return scope.signal(self.key)

    def promql(self, to: Spelling) -> str | None:
        return to.last_rate(self.metric)


class Held(Leaf, Struct, frozen=True):
    """Whether a condition has held for `for_s`, and for at least two scrapes.

    With `stretch`, the duration is multiplied by the window's scale. In Python, the condition reads
    the streak `name`; a single scrape to the contrary does not end a streak. Without a streak the
    condition is false, never unknown. In PromQL it is checked at each evaluation: by the minimum of
    a gauge, or else by a recorded 0/1 series.
    """

    name: str
    of: Condition
    for_s: Number
    stretch: bool = True

    def source(self, scope: Scope, *, side: bool) -> str:
        least_s = f"{self.for_s.source(scope)}{' * facts.scale' if self.stretch else ''}"
        return f"((facts.streaks_s.get({self.name!r}, -1.0) >= {least_s}) is {side})"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        span = f"[{duration(self.lasts_s(to)[1])}]"
        clause = Clause()
        if isinstance(self.of, Compare) and not self.flagged:
            series, bound = self.of.left.promql(to), self.of.right.promql(to)
            held = f"min_over_time({series}{span}) {self.of.sign} {bound}"
            clause = Clause((f"({held})",)) if series is not None else Clause()
        elif self.flag(to) is not None:
            clause = Clause((f"(min_over_time({recorded(self.name)}{span}) == 1)",))
        return clause if side else clause.negated

    def lasts_s(self, to: Spelling) -> tuple[float, float]:
        """Seconds for which the condition must hold: first as the record says, then as PromQL
        checks it."""
        for_s = self.for_s.value * (to.scale if self.stretch else 1.0)
        return for_s, span_s(for_s, max(to.interval_s, to.scrape_s))

    @property
    def flagged(self) -> bool:
        """Whether PromQL needs a 0/1 series for this condition.

        A comparison with a number needs none: the gauge's minimum is compared instead.
        """
        return not (isinstance(self.of, Compare) and isinstance(self.of.right, Number))

    def flag(self, to: Spelling) -> str | None:
        """The 0/1 series of the comparison; None if PromQL cannot compute it."""
        if not isinstance(self.of, Compare):
            return None
        left, right = self.of.left.promql(to), self.of.right.promql(to)
        return None if left is None or right is None else f"{left} {self.of.sign} bool {right}"


class Configured(Leaf, Struct, frozen=True):
    """Whether a label of cache_config_info has this value; unknown without the label."""

    label: str
    value: str

    def source(self, scope: Scope, *, side: bool) -> str:
        now, sign = scope.variable(), "==" if side else "!="
        is_known = f"({now} := facts.config.get({self.label!r})) is not None"
        return f"({is_known} and {now} {sign} {self.value!r})"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        sign = "=" if side else "!="
        absent = "" if side else f',{self.label}!=""'
        series = to.raw("cache_config_info", extra=f'{self.label}{sign}"{self.value}"{absent}')
        return Clause((f"({EVERYWHERE} and on ({to.process}, engine) {series})",))


class Exposed(Leaf, Struct, frozen=True):
    """Whether the page has a metric that vLLM exports only while a feature is in use. Python checks
    whether the signal `key` has a value."""

    metric: str
    key: str

    def source(self, scope: Scope, *, side: bool) -> str:
        return f"({scope.signal(self.key)} {'is not' if side else 'is'} None)"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        clause = Clause((f"({EVERYWHERE} and on ({to.process}) {to.raw(self.metric)})",))
        return clause if side else clause.negated


class Watched(Leaf, Struct, frozen=True):
    """Whether this process has been watched for `windows` windows; never unknown."""

    windows: Number

    def source(self, scope: Scope, *, side: bool) -> str:
        least_s = f"{self.windows.source(scope)} * facts.window_s"
        return f"((facts.observed_s >= {least_s}) is {side})"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        clause = Clause((f"({EVERYWHERE} offset {duration(self.windows.value * to.window_s)})",))
        return clause if side else clause.negated


def signals_of(root: object) -> tuple[str, ...]:
    """Keys of the signals that a condition or quantity reads over the window, each once."""
    return tuple(dict.fromkeys(node.key for node in nodes(root) if isinstance(node, Signal)))
