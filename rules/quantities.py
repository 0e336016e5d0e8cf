"""The quantities and conditions for records: signals, baselines, targets, durations. Pure."""

from __future__ import annotations

from msgspec import Struct

from kneewatch.rules.conditions import Condition, Number, Quantity, Scope
from kneewatch.rules.rule import WINDOW_S


class Live(Quantity, Struct, frozen=True):
    """The value of a signal or derived signal over the window."""

    key: str

    def source(self, scope: Scope) -> str:
        return scope.signal(self.key)


RECENT = {
    "prefix_hit_ratio": "prefix_hit_recent_ratio",
    "prefix_hit_tokens_mean": "prefix_hit_recent_tokens_mean",
    "spec_acceptance_ratio": "spec_acceptance_recent_ratio",
    "lora_change_per_s": "lora_change_recent_per_s",
}
"""The signals that are also read over the newest part of the window, each with the key of that
value."""

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


class BaselineValue(Quantity, Struct, frozen=True):
    """A signal's baseline: its quiet median or the usual value at this hour of the week."""

    key: str

    def source(self, scope: Scope) -> str:
        return f"facts.baseline.get({self.key!r})"


class UsualValue(Quantity, Struct, frozen=True):
    """A signal's usual value at this hour of the week; unknown until enough weeks agree."""

    key: str

    def source(self, scope: Scope) -> str:
        return f"facts.baseline.usual({self.key!r})"


class Target(Quantity, Struct, frozen=True):
    """A latency target; unknown if not configured."""

    name: str

    def source(self, scope: Scope) -> str:
        return f"facts.targets.{self.name}"


class WindowSeconds(Quantity, Struct, frozen=True):
    """The window in seconds: times a rate it gives a count."""

    share: float = 1.0

    def source(self, scope: Scope) -> str:
        return f"({self.share!r} * facts.window_s)"


class Minimum(Quantity, Struct, frozen=True):
    """The smaller of two quantities; if one is unknown, the other one."""

    left: Quantity
    right: Quantity

    def source(self, scope: Scope) -> str:
        left, right = self.left.source(scope), self.right.source(scope)
        return f"{scope.name_of(_smaller)}({left}, {right})"


def _smaller(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)


class Configured(Condition, Struct, frozen=True):
    """Whether a label of cache_config_info has this value; unknown without the label."""

    label: str
    value: str

    def source(self, scope: Scope, *, side: bool = True) -> str:
        now, sign = scope.variable(), "==" if side else "!="
        is_known = f"({now} := facts.config.get({self.label!r})) is not None"
        return f"({is_known} and {now} {sign} {self.value!r})"


class Watched(Condition, Struct, frozen=True):
    """Whether this process has been watched for `windows` windows as set; never unknown.

    A window that is stretched for rare scrapes or long prefills asks for no more.
    """

    windows: Number

    def source(self, scope: Scope, *, side: bool = True) -> str:
        least_s = f"{self.windows.source(scope)} * {WINDOW_S!r} * facts.scale"
        return f"((facts.observed_s >= {least_s}) is {side})"
