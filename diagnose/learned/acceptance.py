"""Values that are kept apart from the usual ones, and how they become usual. Pure.

A value that left its usual range under a fault is not learned. It becomes the usual value when a
person accepts it, or after it has lasted for a set time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec import Struct

from kneewatch.collector.packaged import decoder
from kneewatch.diagnose.account_signals import (
    PREFILL_SPEED,
    SPEED,
    STREAM_RATE,
    STREAM_USUAL,
    is_unchanged,
)
from kneewatch.diagnose.learned.account import Account, AccountState
from kneewatch.diagnose.learned.knee import CurveLearner, LoadPoint
from kneewatch.diagnose.values import Signals
from kneewatch.diagnose.verdict import Cause, Evidence
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.formatting import clock, date, quantity, span
from kneewatch.rules.rule import FAMILIES, LENGTHS, TRACKED, TTFT, Severity
from kneewatch.rules.wire import Figure, UnixTime, rounded, to_ms, written_as

ENGINE_SPEED = "speed"
"""Name of the engine's speed among the families of signals that can be accepted."""

AFTER_S = 86_400.0
TOLD_S = 3600.0
"""A new usual value is reported for so long."""

NEARLY = 0.9
"""What has lasted for this share of the time becomes usual with what has lasted for all of it."""

STATE_EVERY_S = 3600.0
"""What was learned is stored this often, and when a deviation begins or ends."""


class Deviation(Struct, frozen=True):
    """A signal that is kept apart from its usual value; `since_s` is when that began."""

    signal: str
    family: str
    usual: Figure
    now: Figure
    since_s: UnixTime = written_as("since", 0.0)

    def words(self) -> str:
        """The two values in words."""
        now, usual = quantity(self.signal, self.now), quantity(self.signal, self.usual)
        return f"{self.signal} {now} instead of {usual}"


class Acceptance(Struct, frozen=True):
    """Values that became the usual ones at `t_s`, and why."""

    t_s: float
    why: str
    deviations: tuple[Deviation, ...]

    def cause(self, now_s: float) -> Cause | None:
        """The cause that reports it; None once it was reported for long enough."""
        if now_s - self.t_s > TOLD_S:
            return None
        since_s = min(each.since_s for each in self.deviations)
        evidence = tuple(
            Evidence(each.signal, each.now, each.usual, each.words()) for each in self.deviations
        )
        return Cause(
            id="usual_changed",
            confidence=1.0,
            severity=Severity.INFO,
            summary=f"New usual values since {date(since_s)} {clock(since_s)[:5]} UTC "
            f"({self.why}): {'; '.join(each.words() for each in self.deviations[:3])}.",
            evidence=evidence,
            lever="Nothing, if this change was wanted. Otherwise look at what changed then: the "
            "engine is no longer compared with the old values.",
        )


class LearnedState(Struct, frozen=True):
    """What was learned about one engine, as it is stored."""

    t_s: float
    account: AccountState
    medians: Mapping[str, float]
    apart_s: Mapping[str, float] = {}
    acceptance: Acceptance | None = None
    launch: Mapping[str, str] = {}
    windows: tuple[LoadPoint, ...] = ()


_DECODER = decoder(LearnedState)


class KeptApart:
    """Which values of an engine are kept apart from the usual ones, and since when."""

    def __init__(self, account: Account, baseline: Baseline, *, after_s: float) -> None:
        self._account, self._baseline, self._after_s = account, baseline, after_s
        self._since_s: dict[str, float] = {}
        self._stored: tuple[float, bool] | None = None
        self.acceptance: Acceptance | None = None
        """The newest change of usual values."""

    def update(self, now_s: float, values: Signals, disturbed: Collection[str]) -> None:
        """Note which of the disturbed families deviate; accept what has lasted long enough."""
        since_s = self._since_s
        for family in FAMILIES:
            if family not in disturbed:
                since_s.pop(family, None)
            elif family not in since_s and any(self._of_family(family, values)):
                since_s[family] = now_s
        if self._account.is_kept_apart:
            since_s.setdefault(ENGINE_SPEED, min(now_s, self._account.slow_since_s))
        else:
            since_s.pop(ENGINE_SPEED, None)
        if since_s and now_s - min(since_s.values()) >= self._after_s:
            nearly_s = NEARLY * self._after_s
            lasted = [family for family, t_s in since_s.items() if now_s - t_s >= nearly_s]
            self.accept(now_s, values, f"lasted {span(self._after_s)}", lasted)

    def deviations(self, values: Signals, families: Collection[str] = ()) -> list[Deviation]:
        """What deviates now; only of these families, if any are given."""
        return [
            each
            for family in self._since_s
            if not families or family in families
            for each in self._of_family(family, values)
        ]

    def accept(
        self, now_s: float, values: Signals, why: str, families: Collection[str] = ()
    ) -> Acceptance | None:
        """Make present values the usual ones; None if nothing deviates."""
        deviations = tuple(self.deviations(values, families))
        if not deviations:
            return None
        accepted = {each.family for each in deviations}
        if ENGINE_SPEED in accepted:
            self._account.accept()
        elif not accepted.isdisjoint((TTFT, LENGTHS)):
            self._account.accept_work()
        self._baseline.accept(values, accepted & set(FAMILIES))
        for family in accepted:
            self._since_s.pop(family, None)
        self.acceptance, self._stored = Acceptance(to_ms(now_s), why, deviations), None
        return self.acceptance

    def _of_family(self, family: str, values: Signals) -> Iterable[Deviation]:
        since_s = to_ms(self._since_s.get(family, 0.0))
        for key, usual in self._usual(family, values):
            now = values.get(key)
            if now is None or usual is None or _is_near(now, usual):
                continue
            yield Deviation(key, family, rounded(usual) or 0.0, rounded(now) or 0.0, since_s)

    def _usual(self, family: str, values: Signals) -> Iterable[tuple[str, float | None]]:
        if family == ENGINE_SPEED:
            yield from ((SPEED, 1.0), (PREFILL_SPEED, 1.0))
            yield STREAM_RATE, values.get(STREAM_USUAL)
            return
        for key in TRACKED[family]:
            yield key, self._baseline.get(key)

    def state(self, now_s: float, launch: Mapping[str, str], curve: CurveLearner) -> bytes | None:
        """What was learned, encoded to be stored; None while it need not be stored again."""
        stored, is_apart = self._stored, bool(self._since_s)
        if stored is not None and stored[1] == is_apart and now_s - stored[0] < STATE_EVERY_S:
            return None
        medians, windows = self._baseline.medians(), curve.stored()
        if not medians and not windows:
            return None
        self._stored = now_s, is_apart
        state = LearnedState(
            now_s,
            self._account.state(),
            medians,
            dict(self._since_s),
            self.acceptance,
            launch,
            windows,
        )
        return msgspec.json.encode(state)

    def restore(self, body: bytes) -> LearnedState:
        """Go on with what was stored.

        Raises:
            msgspec.DecodeError: it is no such document.
        """
        state = _DECODER.decode(body)
        self._account.restore(state.account)
        self._baseline.restore(state.medians)
        self._since_s = dict(state.apart_s)
        self.acceptance = state.acceptance
        return state


def _is_near(now: float, usual: float) -> bool:
    if now <= 0 or usual <= 0:
        return now == usual
    return is_unchanged(now / usual)
