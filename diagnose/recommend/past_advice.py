"""Which recommendations were followed, and whether their predictions came true. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    ADAPTER_SLOTS,
    NO_PREFIX_CACHE,
    SEATS,
    SPECULATION,
)
from kneewatch.diagnose.deployment.vllm_flags import VLLM, number_of
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value
from kneewatch.diagnose.recommend.context import MOVED, shown
from kneewatch.diagnose.recommend.demand import Demand
from kneewatch.diagnose.recommend.ledger import SEATS_UP
from kneewatch.rules.rule import MORE_IS_BETTER

DEMANDS: Sequence[tuple[str, str, str]] = (
    ("callers", "clients in flight", ".0f"),
    ("held_tokens", "KV tokens of a request", ",.0f"),
    ("arrival_per_s", "arrivals/s", ".1f"),
    ("requests", "requests that run at once", ".0f"),
)
"""Figures of the demand that explain another size: the field, its name and its format."""


_Changed = tuple[str, Mapping[str, float]]
"""Why a size is another one: in words, and the figures in them."""


class HeldAdvice(Struct):
    """What is recommended against a cause: made once, and held until the incident ends.

    `made` has the demand that each recommendation's values were made for, `most` the most requests
    since, `first` its first values, and `changed` why they are others now. Until `whole_s`, a
    window reaches back before the incident, so its figures are not those of the incident; `taken_s`
    is when recommendations were adopted last. `of_callers`: sizes are for callers, or for requests
    that may be of callers.
    """

    whole_s: float = -inf
    taken_s: float = -inf
    of_callers: bool = False

    recommendations: list[Advice] = field(default_factory=list[Advice])
    made: dict[str, Demand] = field(default_factory=dict[str, Demand])
    most: dict[str, float] = field(default_factory=dict[str, float])
    first: dict[str, tuple[FlagChange, ...]] = field(
        default_factory=dict[str, tuple[FlagChange, ...]]
    )
    changed: dict[str, _Changed] = field(default_factory=dict[str, _Changed])

    @property
    def values(self) -> dict[str, Value]:
        return {each.id: each.changes[0].after for each in self.recommendations if each.changes}

    def is_whole_first(self, now_s: float) -> bool:
        """Whether the window lies within the incident for the first time."""
        return self.taken_s < self.whole_s <= now_s

    def misjudges(self, demand: Demand) -> bool:
        """Whether sizes are for callers, but a queue that grows shows that nobody waits for answers
        before the next call."""
        grows = demand.arrival_per_s > demand.served_per_s
        return self.of_callers and demand.callers is None and demand.waiting >= 1 and grows

    def take(self, recommendations: Sequence[Advice], demand: Demand, now_s: float) -> None:
        """Adopt recommendations for the present demand, and note why a size is another one.

        While clearly less is asked, they stay as they were made, unless a change must go further:
        their figures belong to the load that the changes are for. The first time that the window
        lies within the incident, all figures are made anew while requests still wait.
        """
        is_first_whole = self.is_whole_first(now_s) and demand.waiting >= 1
        self.taken_s = now_s
        if self.misjudges(demand):
            self.most.clear()
            self.of_callers = False
        self.of_callers |= demand.callers is not None
        before = {each.id: each for each in self.recommendations}
        taken: list[Advice] = []
        # What may be a backlog is no load that would return.
        surely = demand.running if demand.may_be_callers else demand.requests
        asked = surely + demand.deferred
        for each in recommendations:
            held, most = before.get(each.id), self.most.get(each.id, 0.0)
            is_less = asked * MOVED < most and not is_first_whole
            if held is not None and is_less and not _goes_further(held, each):
                taken.append(held)
                continue
            self.most[each.id] = max(most, asked)
            new = self._explained(each, demand)
            is_same = held is not None and replace(new, as_of_s=held.as_of_s) == held
            taken.append(held if held is not None and is_same else replace(new, as_of_s=now_s))
        self.recommendations = taken

    def _explained(self, new: Advice, demand: Demand) -> Advice:
        if not new.changes:
            return new
        values, first = self.values, self.first.setdefault(new.id, new.changes)
        before = self.made.setdefault(new.id, demand)
        if values.get(new.id, new.changes[0].after) != new.changes[0].after:
            self.made[new.id] = demand
            firsts = ", ".join(str(change.after) for change in first)
            nows = ", ".join(str(change.after) for change in new.changes)
            why, figures = _why(before, demand, new.changes[0], values[new.id])
            firsts_by_flag = {
                f"first_{change.flag.lstrip('-').replace('-', '_')}": change.after
                for change in first
                if isinstance(change.after, int | float)
            }
            words = f" The first advice was {firsts}; it is {nows} now: {why}."
            self.changed[new.id] = (
                (words, {**firsts_by_flag, **figures}) if firsts != nows else ("", {})
            )
        words, numbers = self.changed.get(new.id, ("", {}))
        return replace(new, summary=f"{new.summary}{words}", basis={**new.basis, **numbers})


def _goes_further(held: Advice, new: Advice) -> bool:
    """Whether the first change ends beyond the one held. Where that one was followed, by as much as
    a new load: a backlog that drains fills what was added."""
    if not held.changes or not new.changes:
        return bool(new.changes)
    last, change = held.changes[0], new.changes[0]
    if last.before != change.before:
        before, after = _rank(last.after), _rank(change.after)
        if before is None or after is None or after < NEW_LOAD * before:
            return False
    return _direction(change) * _direction(replace(change, before=last.after)) > 0


def _why(before: Demand, now: Demand, change: FlagChange, held: Value) -> _Changed:
    """Which figure of the demand rose or fell, from what to what.

    Where a change raises a value, the value is higher only for a higher figure.
    """
    raised = _direction(change) > 0
    higher = raised and _direction(replace(change, before=held)) > 0
    if now.is_closed and now.callers and not before.is_closed and higher >= raised:
        words = f"{now.callers:.0f} clients send their next request when the last is answered"
        return words, {"callers": now.callers}
    if before.callers and now.callers is None and not higher:
        return "requests arrive on their own, whether others were answered or not", {}
    for key, name, form in DEMANDS:
        was, is_now = getattr(before, key), getattr(now, key)
        was = None if key == "callers" and now.may_be_callers else was
        if not was or not is_now or (raised and (is_now > was) != higher):
            continue
        if max(was / is_now, is_now / was) >= MOVED:
            moved = "rose" if is_now > was else "fell"
            words = f"{name} {moved} from {was:{form}} to {is_now:{form}}"
            return words, shown({f"first_{key}": was, f"now_{key}": is_now})
    return "more has been measured since", {}


# --- Which changes a page shows -------------------------------------------------------------------


def config_shows(flag: str, value: Value, config: Mapping[str, str]) -> bool | None:
    """Whether cache_config_info shows that a flag has the wanted value.

    `value` None means that the flag should not be given. Returns None if the page has no label for
    the flag.
    """
    flag_record = VLLM.get(flag)
    if flag_record is None or not flag_record.label or flag_record.label not in config:
        return None
    label = config[flag_record.label]
    if flag == NO_PREFIX_CACHE:
        return label == "True"
    if value is None:
        return label in ("None", "")
    return label == str(value) or (not isinstance(value, str) and number_of(label) == value)


# --- Followed recommendations are not reversed ----------------------------------------------------


LAPSED_S = 24 * 3600.0
"""A change counts as following a recommendation if it is made within this time."""

HELD_S = 6 * 3600.0
"""For this time, a followed change is not reversed without new evidence."""

NEW_LOAD = 1.5
"""A load that grew or shrank by this ratio counts as new evidence."""


_ORDER: Mapping[str, int] = {"auto": 1, "bfloat16": 1, "float16": 1, "half": 1, "fp8": 0}


class Advised(Struct, frozen=True):
    """A recommended change, when it was recommended, and for which load in requests."""

    change: FlagChange
    t_s: float
    requests: float


class AdviceTracker:
    """The changes recommended for one engine, and those found applied after a restart."""

    def __init__(self) -> None:
        self._advised: dict[str, Advised] = {}
        self._followed: dict[str, Advised] = {}

    def advised(self, now_s: float, recommendations: Iterable[Advice], *, requests: float) -> None:
        for recommendation in recommendations:
            for change in recommendation.changes:
                self._advised[_key(change.flag)] = Advised(change, now_s, requests)

    def restarted(
        self,
        now_s: float,
        config: Mapping[str, str],
        *,
        before: Mapping[str, str] | None = None,
    ) -> None:
        """After a restart, find out from the configuration which changes were followed.

        A flag that the page does not show counts as followed if other flags changed. If all flags
        are as `before`, the restart may have been a crash. Then only the seats are assumed to
        be followed; `allowed` corrects this from the observed batch.
        """
        crashed = before is not None and _flags_of(before) == _flags_of(config)
        for flag, advised in list(self._advised.items()):
            if now_s - advised.t_s > LAPSED_S:
                del self._advised[flag]
            elif crashed and flag != SEATS:
                continue
            elif _follows(advised.change, config):
                self._followed[flag] = Advised(advised.change, now_s, advised.requests)
                del self._advised[flag]

    def allowed(
        self,
        now_s: float,
        recommendations: Sequence[Advice],
        *,
        requests: float,
        running: float = 0.0,
    ) -> list[Advice]:
        """The recommendations, without those that reverse a recently followed one.

        A reversal is allowed again once the load has changed. A batch (`running`) above the
        recommended number of seats shows that the flag was not set.
        """
        seats = self._followed.get(SEATS)
        if seats is not None and running > (_rank(seats.change.after) or inf):
            del self._followed[SEATS]
        return [
            recommendation
            for recommendation in recommendations
            if not any(self._reverses(now_s, c, requests) for c in _changes(recommendation))
        ]

    def _reverses(self, now_s: float, change: FlagChange, requests: float) -> bool:
        followed = self._followed.get(_key(change.flag))
        if followed is None or now_s - followed.t_s > HELD_S:
            return False
        low, high = sorted((max(requests, 1.0), max(followed.requests, 1.0)))
        if high >= NEW_LOAD * low:
            return False
        return _direction(change) * _direction(followed.change) < 0


def _changes(recommendation: Advice) -> Sequence[FlagChange]:
    """Its changes; seats whose number is being measured are raised too."""
    unsized = recommendation.id == SEATS_UP and not recommendation.changes
    return (FlagChange(SEATS, 0, 1),) if unsized else recommendation.changes


def _key(flag: str) -> str:
    """A key for the flag; the same for a switch and for its negation (`--no-enable-`)."""
    return flag.replace("--no-enable-", "--enable-")


def _flags_of(config: Mapping[str, str]) -> dict[str, str | None]:
    return {record.label: config.get(record.label) for record in VLLM.values() if record.label}


def _follows(change: FlagChange, config: Mapping[str, str]) -> bool:
    followed = config_shows(change.flag, change.after, config)
    return change.flag.startswith("--") if followed is None else followed


def _direction(change: FlagChange) -> int:
    """1 if a change raises its value, -1 if it lowers it, 0 if unknown."""
    before, after = _rank(change.before), _rank(change.after)
    if after is None or before is None:
        # Setting a limit where none was known lowers it, removing one raises it.
        return 0 if before is after else (1 if after is None else -1)
    return (after > before) - (after < before)


def _rank(value: Value) -> float | None:
    if isinstance(value, str):
        return _ORDER.get(value)
    return None if value is None else float(value)


# The outcome of a recommendation: whether it was followed and whether its prediction held. Pure.
#
# A change counts as followed where the engine's labels show it or, for flags without a label,
# where the signals can only come from it. A restart alone proves nothing.


OPEN, APPLIED, KEPT, MISSED = "open", "applied", "kept", "missed"
WORSENED, LAPSED = "worsened", "lapsed"

SETTLED_S = 120.0
"""Seconds until a server has settled after a restart: caches are cold and the window is filling."""

NEAR_RATIO = 0.15
"""Largest relative error of a prediction that still counts as right."""

GROWN_RATIO = 1.02

Means = Mapping[str, float | None]
ChangeDocument = Mapping[str, Any]
"""A change as in the JSON document: flag, from, to."""


MEASURES: Mapping[str, tuple[str, float]] = {
    "kv_capacity_tokens": ("kv_capacity_tokens", 64),
    "kv_usage_ratio": ("kv_usage_avg_ratio", 0.03),
    "preemption_per_s": ("preemption_per_s", 0.05),
    "waiting": ("waiting_avg", 1),
    "waiting_deferred": ("waiting_deferred_avg", 1),
    "queue_wait_s": ("queue_mean_s", 0.05),
    "ttft_s": ("ttft_mean_s", 0.02),
    "itl_s": ("itl_mean_s", 0.002),
    "prefill_mean_s": ("prefill_mean_s", 0.01),
    "itl_stall_per_s": ("itl_stall_per_s", 0.05),
    "itl_stall_time_ratio": ("itl_stall_time_ratio", 0.01),
    "spec_acceptance_ratio": ("spec_acceptance_ratio", 0.05),
    "lora_max": ("lora_max", 0),
}
"""For each predicted number, the signal that measures it, and how near is right in any case."""

FELT: Mapping[str, frozenset[str]] = {
    "preemption_per_s": frozenset(),
    "ttft_s": frozenset({"waiting", "queue_wait_s", "prefill_mean_s", "prefill_p99_s"}),
    "itl_s": frozenset({"itl_stall_per_s", "itl_stall_time_ratio"}),
}
"""Numbers that users notice, each with related numbers.

If such a number gets worse, it counts as worsened even without a prediction, unless a related
number was predicted.
"""

EVIDENT = frozenset({ADAPTER_SLOTS, SPECULATION, SEATS})
"""Flags that no label shows, but whose effect the signals show."""

EVIDENCE = ("running_max", "lora_max", "spec_draft_tokens_per_s", "running_avg", "waiting_avg")
SIGNALS = tuple(dict.fromkeys([*(signal for signal, _ in MEASURES.values()), *EVIDENCE]))
"""The signals that are compared before and after a change."""


def signals_show_change(change: ChangeDocument, before: Means, after: Means) -> bool:
    """Whether the signals show that a change was made, if no label on the page shows it."""
    flag, old, new = change["flag"], change["from"], change["to"]
    if flag == ADAPTER_SLOTS:
        return bool(after.get("lora_max") == new)
    if flag == SPECULATION and new is None:
        drafted = "spec_draft_tokens_per_s"
        return bool(before.get(drafted)) and not after.get(drafted)
    if flag == SEATS and isinstance(new, int | float):
        running, most = before.get("running_max"), after.get("running_max")
        if running is None or most is None:
            return False
        if new < (running if old is None else old):
            queued = (after.get("waiting_avg") or 0.0) >= 1
            return most <= new and queued and running > new
        return new >= most > GROWN_RATIO * max(running, float(old or 0.0))
    return False


def outcome_of(
    document: Mapping[str, Any], before: Means, after: Means
) -> tuple[str, dict[str, float]]:
    """The outcome of a followed recommendation as a word, and the measured values of the predicted
    numbers.

    - applied: none of them can be measured.
    - kept: every number is as predicted or better.
    - worsened: a predicted number, or a number that users notice, got worse without being predicted
      to.
    - missed: everything else.
    """
    measured: dict[str, float] = {}
    right, worse = True, False
    predicted = document["predicted"]
    for key, (signal, near) in MEASURES.items():
        expected, now, old = predicted.get(key), after.get(signal), before.get(signal)
        if expected is None or now is None:
            continue
        measured[key] = now
        if _worse(signal, now, than=expected, near=near):
            right = False
            worse = worse or _worse(signal, now, than=old, near=near)
    if not measured:
        return APPLIED, measured
    for key, parts in FELT.items():
        signal, near = MEASURES[key]
        now, old = after.get(signal), before.get(signal)
        predicted_keys = predicted.keys() & {key, *parts}
        if not predicted_keys and now is not None and _worse(signal, now, than=old, near=near):
            measured[key], worse = now, True
    return WORSENED if worse else KEPT if right else MISSED, measured


def _worse(signal: str, now: float, *, than: float | None, near: float) -> bool:
    """Whether a signal is clearly worse than another value; false if that is unknown."""
    if than is None:
        return False
    apart = than - now if signal in MORE_IS_BETTER else now - than
    return apart > max(near, NEAR_RATIO * abs(than))
