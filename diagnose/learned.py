"""What one engine is held against, learned while it is watched: quiet times, its own knee, lengths
of answers, what is stated of the workload, and where the load is going. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kneewatch.collector.history import History
from kneewatch.collector.window import Window
from kneewatch.diagnose.causes.workload import LENGTH_POINTS
from kneewatch.diagnose.drift import Departure, Drift
from kneewatch.diagnose.forecast import Forecaster, demand_ratio, forecast_values
from kneewatch.diagnose.launches import same_launch
from kneewatch.diagnose.lengths import OutputLengths
from kneewatch.diagnose.live_knee import LiveKnee
from kneewatch.diagnose.profile import LONG_WINDOWS, Profile
from kneewatch.diagnose.slo_forecast import SloForecaster
from kneewatch.diagnose.stated_workload import ANSWERS
from kneewatch.diagnose.workload_watch import WorkloadWatch
from kneewatch.rules.baseline import LENGTHS, Baseline

Values = Mapping[str, float | None]


class Learned:
    """One engine's past, as far as something is judged by it.

    Quiet times and the knee outlive a restart of the server; a server that was launched otherwise
    has another knee.
    """

    def __init__(self, profile: Profile) -> None:
        window_s = profile.window_s
        self._profile = profile
        self.baseline = Baseline(window_s=window_s)
        self.workload = WorkloadWatch(profile.stated, window_s=window_s)
        self.knee = self._new_knee()
        self._launch: Mapping[str, str] = {}
        self._lengths = OutputLengths(
            window_s=window_s,
            longest_s=LONG_WINDOWS * window_s,
            stated=self.workload.points.get(ANSWERS, ()),
        )
        self._forecaster = Forecaster(window_s=window_s)
        self._slo_forecaster = SloForecaster(
            window_s=window_s, ttft_p99_s=profile.targets.ttft_p99_s, seats=profile.stated.seats
        )

    def _new_knee(self) -> LiveKnee:
        return LiveKnee(window_s=self._profile.window_s, targets=self._profile.targets)

    def forecasts(self, t_s: float, values: Values) -> dict[str, float | None]:
        """Where the load is going, after a scrape with these values."""
        demand = demand_ratio(values)
        forecast = forecast_values(demand, self._forecaster.update(t_s, demand))
        return forecast | self._slo_forecaster.update(t_s, values)

    def longer(self, history: History, window: Window, values: Values) -> Drift | None:
        """How far answers are from those of quiet times, while many more end at their limit."""
        points = values.get("finished_length_drift_points") or 0.0
        return self._lengths.drift(history, window) if points >= LENGTH_POINTS else None

    def endless(self, history: History, window: Window, values: Values) -> Departure | None:
        """How many answers go far beyond what is stated, while many end at their limit."""
        at_limit = values.get("finished_length_ratio") or 0.0
        return self._lengths.endless(history, window) if at_limit >= LENGTH_POINTS else None

    def quiet(self, t_s: float, values: Values, window: Window, families: Collection[str]) -> None:
        """Add a scrape that is quiet for these families of signals."""
        self.baseline.learn(t_s, values, families)
        if LENGTHS in families:
            self._lengths.learn(t_s, window)

    def launched(self, config: Mapping[str, str]) -> None:
        """Take how the server says that it was launched."""
        if config == self._launch:
            return
        if config and self._launch and not same_launch(config, self._launch):
            self.knee = self._new_knee()
        self._launch = config or self._launch

    def begin_anew(self) -> None:
        """The process was replaced, or the clock was set back: what was held has no since."""
        self._forecaster.forget()
        self._slo_forecaster.forget()
        self.workload.forget()
