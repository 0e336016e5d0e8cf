"""Recommendations over time: applied ones are not reversed, sizes grow within an incident. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from kneewatch.diagnose.deployment.vllm_flags import FLAGS
from kneewatch.diagnose.recommend.demand import Demand
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation, Value

LIMITS = frozenset(
    {
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--long-prefill-token-threshold",
        "--max-num-queued-reqs",
    }
)
"""Flags that are lowered where what they are now is not known."""


class Incidents:
    """The peak demand and the largest sizes told, by cause, while each cause lasts."""

    def __init__(self) -> None:
        self._peaks: dict[str, Demand] = {}
        self._told: dict[str, dict[str, Recommendation]] = {}

    def keep(self, causes: Collection[str]) -> None:
        """Forget the causes that have ended."""
        for ended in [cause for cause in self._peaks if cause not in causes]:
            del self._peaks[ended]
            self._told.pop(ended, None)

    def peak(self, cause: str, now: Demand) -> Demand:
        """The most that was wanted since the cause began."""
        was = self._peaks.get(cause, now)
        self._peaks[cause] = made = replace(
            now,
            requests=max(was.requests, now.requests),
            running=max(was.running, now.running),
            waiting=max(was.waiting, now.waiting),
            held_tokens=_larger(was.held_tokens, now.held_tokens),
            served_per_s=max(was.served_per_s, now.served_per_s),
            arrival_per_s=max(was.arrival_per_s, now.arrival_per_s),
            spread_tokens=max(was.spread_tokens, now.spread_tokens),
        )
        return made

    def grown(self, made: Recommendation) -> Recommendation:
        """The recommendation, or the one told before where that went further."""
        told = self._told.setdefault(made.cause, {})
        was = told.get(made.id)
        if was is not None and _went_further(was, made):
            return was
        told[made.id] = made
        return made


def _larger(was: float | None, now: float | None) -> float | None:
    return max((value for value in (was, now) if value is not None), default=None)


def _went_further(was: Recommendation, now: Recommendation) -> bool:
    before = {change.flag: change for change in was.changes}
    if before.keys() != {change.flag for change in now.changes}:
        return False
    return any(_further(before[change.flag], change.after) for change in now.changes)


def _further(was: Change, after: Value) -> bool:
    told = was.after
    if isinstance(told, bool | str | None) or isinstance(after, bool | str | None):
        return False
    lowered = was.flag in LIMITS
    if isinstance(was.before, int | float):
        lowered = told < was.before
    return told < after if lowered else told > after


# --- Whether a page shows that a recommended change was made --------------------------------------


def shown(flag: str, wanted: Value, config: Mapping[str, str]) -> bool | None:
    """Whether cache_config_info says that a flag is as wanted (None: left out); None where it
    cannot say: no label, or no flag of vLLM."""
    known = FLAGS.get(flag)
    if known is None or not known.label or known.label not in config:
        return None
    told = config[known.label]
    if flag == "--no-enable-prefix-caching":
        return told == "True"
    if wanted is None:
        return told in ("None", "")
    return told == str(wanted) or _same_number(told, wanted)


def _same_number(told: str, wanted: str | float) -> bool:
    try:
        return abs(float(told) - float(wanted)) <= 1e-6 * abs(float(wanted))
    except ValueError:
        return False


# --- Recommendations over time: one that was followed is not reversed at once ---------------------


REMEMBERED_S = 24 * 3600.0
"""A change that shows within this long of its recommendation was made for it."""

HELD_S = 6 * 3600.0
"""How long a change that was followed is not reversed without new evidence."""

NEW_LOAD = 1.5
"""A load that has grown or shrunk by this much is new evidence."""

SEATS = "--max-num-seqs"

_ORDER: Mapping[str, int] = {"auto": 1, "bfloat16": 1, "float16": 1, "half": 1, "fp8": 0}


@dataclass(frozen=True, slots=True)
class Advised:
    """A change as it was recommended, when, and the load (requests) it was computed for."""

    change: Change
    t_s: float
    requests: float


class RecommendationTracker:
    """What was recommended to one engine, and what of it was followed, across restarts."""

    def __init__(self) -> None:
        self._advised: dict[str, Advised] = {}
        self._followed: dict[str, Advised] = {}

    def advised(self, now_s: float, told: Iterable[Recommendation], *, requests: float) -> None:
        """Remember what was recommended."""
        for recommendation in told:
            for change in recommendation.changes:
                self._advised[_key(change.flag)] = Advised(change, now_s, requests)

    def restarted(
        self,
        now_s: float,
        config: Mapping[str, str],
        *,
        before: Mapping[str, str] | None = None,
    ) -> None:
        """The process was replaced: what it was started with shows what was followed.

        A flag that the page does not show counts as followed where others have changed; where
        all are as `before`, it may have been a crash, and only the seats are told later by the
        batch (`allowed`).
        """
        crashed = before is not None and _flags_of(before) == _flags_of(config)
        for flag, advised in list(self._advised.items()):
            if now_s - advised.t_s > REMEMBERED_S:
                del self._advised[flag]
            elif crashed and flag != SEATS:
                continue
            elif _follows(advised.change, config):
                self._followed[flag] = Advised(advised.change, now_s, advised.requests)
                del self._advised[flag]

    def allowed(
        self,
        now_s: float,
        made: Sequence[Recommendation],
        *,
        requests: float,
        running: float = 0.0,
    ) -> list[Recommendation]:
        """Those that do not take back what was just followed, unless the load is another.

        A batch (`running`) above the seats that were advised shows that nobody set them.
        """
        seats = self._followed.get(SEATS)
        if seats is not None and running > (_rank(seats.change.after) or inf):
            del self._followed[SEATS]
        return [
            recommendation
            for recommendation in made
            if not any(self._reverses(now_s, c, requests) for c in recommendation.changes)
        ]

    def _reverses(self, now_s: float, change: Change, requests: float) -> bool:
        followed = self._followed.get(_key(change.flag))
        if followed is None or now_s - followed.t_s > HELD_S:
            return False
        low, high = sorted((max(requests, 1.0), max(followed.requests, 1.0)))
        if high >= NEW_LOAD * low:
            return False
        return _direction(change) * _direction(followed.change) < 0


def _key(flag: str) -> str:
    """One name for a switch and for what turns it off."""
    return flag.replace("--no-enable-", "--enable-")


def _flags_of(config: Mapping[str, str]) -> dict[str, str | None]:
    return {known.label: config.get(known.label) for known in FLAGS.values() if known.label}


def _follows(change: Change, config: Mapping[str, str]) -> bool:
    told = shown(change.flag, change.after, config)
    return change.flag.startswith("--") if told is None else told


def _direction(change: Change) -> int:
    """Whether a change goes up (1), down (-1), or neither can be told (0)."""
    before, after = _rank(change.before), _rank(change.after)
    if after is None or before is None:
        # A limit where none was known comes down, one that is taken away goes up.
        return 0 if before is after else (1 if after is None else -1)
    return (after > before) - (after < before)


def _rank(value: Value) -> float | None:
    if isinstance(value, str):
        return _ORDER.get(value)
    return None if value is None else float(value)
