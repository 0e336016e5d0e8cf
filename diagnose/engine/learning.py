"""What is learned about one engine: usual values, knee, lengths, forecasts, the account. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.capacity import LearnedKnee
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.unexplained import FAR_OFF_HELD, PAUSES_HELD, UNEXPLAINED_LATENCY
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.learned.acceptance import KeptApart
from kneewatch.diagnose.learned.account import Account
from kneewatch.diagnose.learned.knee import CurveLearner, same_launch
from kneewatch.diagnose.learned.kv_forecast import KvForecaster
from kneewatch.diagnose.learned.live_workload import WorkloadWatch, endless
from kneewatch.diagnose.learned.slo_forecast import SloForecaster
from kneewatch.diagnose.learned.slow_trends import SlowTrends
from kneewatch.diagnose.lengths import ANSWERS, Departure
from kneewatch.diagnose.ranking import moved_families
from kneewatch.diagnose.values import Signals, Values
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.cascade import EVICTS
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import (
    FAMILIES,
    LENGTHS,
    QUEUE_MOVES,
    QUIET_WAITING,
    SLOW_MOVES,
    STAGE_MOVES,
    TTFT,
    WARNING,
    Finding,
)

POINTS_KEPT = 12
"""Windows kept per concurrency step: a daemon monitors many engines."""


class Learned:
    """What was learned about one engine: baselines, knee, output lengths, forecasts.

    Baselines and the knee survive a restart of the server. A changed launch configuration resets
    the knee.
    """

    def __init__(self, profile: Profile) -> None:
        window_s = profile.window_s
        self._profile = profile
        expected = profile.expected_prefix_hit_ratio
        self.baseline = Baseline(
            window_s=window_s, stated={} if expected is None else {"prefix_hit_ratio": expected}
        )
        self._disturbed_s = dict.fromkeys(FAMILIES, float("-inf"))
        self.workload = WorkloadWatch(profile.stated, window_s=window_s)
        self._forget_loads()
        self.launch: Mapping[str, str] = {}
        """Labels of cache_config_info on the newest page that had them."""
        self.slow_trends = SlowTrends()
        self.account = Account()
        self.kept_apart = KeptApart(self.account, self.baseline, after_s=profile.usual_after_s)
        self._forecaster = KvForecaster(window_s=window_s, ahead_s=profile.kv_horizon_s)
        self._slo_forecaster = SloForecaster(
            window_s=window_s, ttft_p99_s=profile.targets.ttft_p99_s, seats=profile.stated.seats
        )

    def _forget_loads(self) -> None:
        self.curve = CurveLearner(window_s=self._profile.window_s, kept=POINTS_KEPT)
        self._knee: tuple[float, LearnedKnee | None] = (float("-inf"), None)

    def knee(self, t_s: float, values: Signals) -> LearnedKnee | None:
        """The knee after a scrape, computed once a window; None if too few loads were seen."""
        self.curve.learn(t_s, values)
        if not 0 <= t_s - self._knee[0] < self._profile.window_s:
            self._knee = t_s, self.curve.knee(t_s, self._profile.targets)
        return self._knee[1]

    def forecasts(self, t_s: float, values: Values) -> dict[str, float | None]:
        """The forecast signals after a scrape."""
        exhausted = self._forecaster.update(t_s, values.signals, arrivals=values.arrivals)
        return exhausted | self._slo_forecaster.update(t_s, values.signals)

    def set_seats(self, seats: float | None) -> None:
        """Set the launch's limit on running requests; None if unknown."""
        self._slo_forecaster.seats = seats

    def endless_outputs(self, values: Values) -> Departure | None:
        """How many outputs far exceed the stated lengths; None unless many end at their limit."""
        answers = values.answers
        return None if answers is None else endless(self.workload.points.get(ANSWERS, ()), answers)

    def learn(self, facts: Facts, concluded: Sequence[Cause], crossed: Sequence[Finding]) -> None:
        """Add the scrape to the baselines of the families that no recent problem disturbed."""
        disturbed = moved_families(concluded, facts)
        disturbed.update(
            family
            for finding in crossed
            if finding.held >= WARNING
            for family in rule_of(finding).moves
        )
        if facts.stage.level >= EVICTS:
            disturbed.update(STAGE_MOVES)
        # Deferred requests are usual on a server that fetches KV; those that queue are not.
        if facts.get("waiting_avg") - facts.get("waiting_deferred_avg") >= QUIET_WAITING:
            disturbed.update(QUEUE_MOVES)
        if self.account.is_slow:
            disturbed.update(SLOW_MOVES)
        if facts.held(FAR_OFF_HELD, 0.0) or facts.held(PAUSES_HELD.name, 0.0):
            disturbed.update(UNEXPLAINED_LATENCY.moves)
        for family in disturbed:
            self._disturbed_s[family] = facts.now_s
        self.kept_apart.update(facts.now_s, facts.values, disturbed)
        if facts.observed_s < self._profile.window_s / 2 or not facts.get("arrival_per_s"):
            return
        settled_s = facts.now_s - facts.window_s
        families = [family for family, t_s in self._disturbed_s.items() if t_s < settled_s]
        if families:
            self.baseline.learn(facts.now_s, facts.values, families)
        if TTFT in families:
            self.account.learn_usual(facts.now_s, answers=LENGTHS in families)

    def state(self, t_s: float) -> bytes | None:
        """What was learned, to be stored; None while it need not be stored again."""
        return self.kept_apart.state(t_s, self.launch, self.curve)

    def restore(self, body: bytes) -> None:
        """Go on with what was stored before a restart of the daemon."""
        state = self.kept_apart.restore(body)
        self.curve.recall(state.windows)
        self._knee = (float("-inf"), None)
        self.launch = state.launch or self.launch

    def set_launch(self, config: Mapping[str, str]) -> None:
        """Set the launch configuration that the server exports; a change resets the knee."""
        if config == self.launch:
            return
        if config and self.launch and not same_launch(config, self.launch):
            self._forget_loads()
        self.launch = config or self.launch

    def reset(self, t_s: float) -> None:
        """Forget trends and durations, because the process was replaced or the clock was set
        back."""
        self._disturbed_s = dict.fromkeys(FAMILIES, t_s)
        self._forecaster.forget()
        self._slo_forecaster.forget()
        self.slow_trends.forget()
        self.account.restarted()
        self.workload.forget()
