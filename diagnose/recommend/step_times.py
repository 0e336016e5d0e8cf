"""The step times of one server, from the windows of its own curve. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import compress
from math import ceil, floor, log2, sqrt
from operator import mul
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.learned.knee import FORGOTTEN_S, CurveLearner

STEP_FIELDS = (
    *("t_s", "running", "itl_s", "context_tokens"),
    *("prefill_s", "computed_tokens", "outside_s", "requests_per_s"),
)
"""The fields of a point that are `StepTimes`' columns, in their order."""

STEP_WINDOWS_MIN = 3
BUSY_MOST_RATIO = 0.95
"""Prompts keep an engine busy for at most this share of the time, as far as a wait is computed."""

ERROR_WINDOWS_MAX = 32
"""Most windows for which an error is computed. The error is only shown; nothing depends on it."""


class Prompts(Struct, frozen=True):
    """The seconds that prompts take of the engine's steps.

    Their mean, and the squared coefficient of variation.
    """

    mean_s: float
    varies: float

    def wait_s(self, per_s: float) -> float:
        """Mean wait for prompts ahead, by Pollaczek and Khinchine, where `per_s` arrive."""
        busy = min(BUSY_MOST_RATIO, per_s * self.mean_s)
        return busy * self._alone_s / (1 - busy)

    def per_s(self, requests: float, request_s: float) -> float:
        """Requests/s where so many are in flight, each for `request_s` and the wait (Little)."""
        # requests = per_s (request_s + wait_s(per_s)), solved for per_s.
        mean_s = self.mean_s
        linear = request_s + requests * mean_s
        square = mean_s * (self._alone_s - request_s)
        return 2 * requests / (linear + sqrt(max(0.0, linear**2 + 4 * requests * square)))

    @property
    def _alone_s(self) -> float:
        return self.mean_s * (1 + self.varies) / 2


def reaches(running: float, least: float, most: float) -> bool:
    """Whether a batch lies between the smallest and the largest that were measured, or beyond by
    no more than BEYOND_RATIO."""
    return least <= running <= BEYOND_RATIO * most


class StepTimes(Struct, frozen=True, dict=True):
    """Step times measured on this server, without any data sheet figure.

    A decode step takes a + b x running + c x context tokens of all running requests. The
    coefficients are fitted by least squares. Step times are not linear from one request to
    hundreds, so a window counts more the nearer its batch is to the requested batch.

    There are at least two windows; each has a value in every column, which may be NaN for prefills,
    computed tokens and times outside.
    """

    times_s: Sequence[float]
    batches: Sequence[float]
    steps_s: Sequence[float]
    contexts: Sequence[float]
    prefills_s: Sequence[float]
    computed: Sequence[float]
    outsides_s: Sequence[float]
    requests_per_s: Sequence[float]

    @classmethod
    def of(cls, curve: CurveLearner, now_s: float) -> StepTimes | None:
        """Step times from the curve's windows; None if too few windows have all the values
        needed."""
        columns = [curve.column(name) for name in STEP_FIELDS]
        # A comparison with NaN is false.
        usable = [
            now_s - t_s <= FORGOTTEN_S and running > 0 and step_s > 0 and context > 0
            for t_s, running, step_s, context in zip(*columns[:4], strict=True)
        ]
        if sum(usable) < STEP_WINDOWS_MIN:
            return None
        times_s, batches, *others = [list(compress(column, usable)) for column in columns]
        # Where nothing runs for a part of the window, the batch of its steps is above its mean.
        return cls(times_s, [running if running > 1 else 1.0 for running in batches], *others)

    @cached_property
    def least_running(self) -> int:
        """The smallest batch measured, in requests."""
        return floor(min(self.batches))

    @cached_property
    def most_running(self) -> int:
        """The largest batch measured, in requests."""
        return ceil(max(self.batches))

    def reaches(self, running: float) -> bool:
        """Whether the times of a batch follow from those measured."""
        return reaches(running, self.least_running, self.most_running)

    def itl_s(self, running: float, context_tokens: float, *, near: float | None = None) -> float:
        """Mean seconds of a step with `running` decodes of `context_tokens` each, prefill included.

        Windows near the batch `near` count most; by default it is `running`. For a fixed `near`, a
        larger batch never takes less time, and its time never grows faster than the batch.
        """
        return self._decode.at(running, running * context_tokens, near=near)

    @cached_property
    def _decode(self) -> _NearFit:
        tokens = map(mul, self.batches, self.contexts)
        rows = list(zip(self.batches, tokens, self.steps_s, strict=True))
        return _NearFit(rows, self._bands)

    @cached_property
    def _bands(self) -> list[int]:
        # As `_band`, without a call for each.
        return [round(_BANDS_A_DOUBLING * log2(batch)) for batch in self.batches]

    def prompt_s(self, running: float, computed_tokens: float) -> float:
        """Seconds that a prompt adds to steps of this batch; 0 if unknown.

        Its first token comes after one step and as long. In a larger batch more prompts share a
        step.
        """
        fit = self._prompts
        return 0.0 if fit is None else computed_tokens * fit.at(running, 0.0)

    @cached_property
    def _prompts(self) -> _NearFit | None:
        """The seconds per computed prompt token, by the windows that show them."""
        windows = zip(
            self._bands, self.batches, self.steps_s, self.prefills_s, self.computed, strict=True
        )
        bands, rows = list[int](), list[_Row]()
        for band, batch, step_s, prefill_s, computed in windows:
            if prefill_s > 0 and computed > 0:
                bands.append(band)
                rows.append((batch, 0.0, max(0.0, prefill_s - step_s) / computed))
        return _NearFit(rows, bands) if rows else None

    def outside_s(self, running: float, prompts: Prompts, per_s: float) -> float:
        """Seconds of TTFT before the engine computes the prompt; 0 if not measured.

        The API server also serves the running streams, so it is the median of the windows with the
        nearest batches. If more prompts arrive than then, they wait longer for each other, as far
        as the windows show such waits at all.
        """
        prompts = replace(prompts, mean_s=min(prompts.mean_s, 1 / max(self.requests_per_s)))
        measured = sorted(
            (abs(log2(batch / running)), outside_s, prompts.wait_s(then_per_s))
            for batch, outside_s, then_per_s in zip(
                self.batches, self.outsides_s, self.requests_per_s, strict=True
            )
            if outside_s >= 0  # false for NaN
        )
        expected_s, wait_s = sum(each[2] for each in measured), prompts.wait_s(per_s)
        shown = min(1.0, sum(each[1] for each in measured) / expected_s) if expected_s else 0.0
        nearest = [
            outside_s + shown * max(0.0, wait_s - then_s)
            for _, outside_s, then_s in measured[:STEP_WINDOWS_MIN]
        ]
        return median(nearest) if nearest else 0.0

    @cached_property
    def error_ratio(self) -> float:
        """Median relative error when each window's decode step is predicted from all other
        windows."""
        return median(self._decode.error_ratios(rows_max=ERROR_WINDOWS_MAX))


BEYOND_RATIO = 2.0
"""Up to this multiple of the largest batch measured, its line is followed."""

COLLINEAR = 0.98
"""Above this squared correlation, the effects of batch and context cannot be told apart."""

_BANDS_A_DOUBLING = 4
_SPREAD_MIN_RATIO = 1e-9
"""Smallest ratio of variance to mean square that is a real spread and not a rounding error."""

_Row = tuple[float, float, float]


class _NearFit:
    """A least-squares fit of rows (batch, tokens, value), weighted towards the requested batch.

    The nearer a row's batch, the more the row counts; distance is measured in bands of a quarter of
    a doubling. Errors are relative to the value. Rows of a band have equal weight, so a fit needs
    only sums over each band. To leave out a row, its terms are subtracted from the sums.
    """

    def __init__(self, rows: Sequence[_Row], bands: Sequence[int]) -> None:
        self._rows, self._row_bands = rows, bands
        self._values = sorted([value for _, _, value in rows])
        by_band = {band: [0.0] * 9 for band in bands}
        for row, band in zip(rows, bands, strict=True):
            _add(by_band[band], row, 1.0)
        self._bands = list(by_band)
        self._columns = list(zip(*by_band.values(), strict=True))
        self._weighted: dict[int, list[float]] = {}

    def at(self, running: float, tokens: float, *, near: float | None = None) -> float:
        """The fitted value for a batch and its tokens, limited to the range of measured values.

        Rows near the batch `near` count most; by default it is `running`.
        """
        value = _line(self._sums_near(_band(near or running)), running, tokens)
        return min(max(value, self._values[0]), self._values[-1])

    def error_ratios(self, *, rows_max: int) -> list[float]:
        """Relative errors when a row's value is predicted from all other rows.

        At most `rows_max` rows are used, evenly spaced. There must be two or more rows.
        """
        values, ratios = self._values, list[float]()
        for at in range(0, len(self._rows), ceil(len(self._rows) / rows_max)):
            row = running, tokens, value = self._rows[at]
            sums = self._sums_near(self._row_bands[at]).copy()
            _add(sums, row, -1.0)
            least = values[1] if value == values[0] else values[0]
            most = values[-2] if value == values[-1] else values[-1]
            ratios.append(abs(min(max(_line(sums, running, tokens), least), most) / value - 1))
        return ratios

    def _sums_near(self, band: int) -> list[float]:
        if band not in self._weighted:
            nearness = [_nearness(other - band) for other in self._bands]
            self._weighted[band] = [sum(map(mul, nearness, column)) for column in self._columns]
        return self._weighted[band]


def _band(batch: float) -> int:
    return round(_BANDS_A_DOUBLING * log2(batch))


@lru_cache(maxsize=256)
def _nearness(bands: int) -> float:
    """Weight of a row whose batch is this many bands away from the requested batch."""
    return (1 / (1 + (bands / _BANDS_A_DOUBLING) ** 2)) ** 2


def _add(sums: list[float], row: _Row, times: float) -> None:
    """Add a row's terms to a fit's sums, multiplied by a weight and by `times`."""
    batch, tokens, value = row
    weight = times / (value or 1.0) ** 2
    of_batch, of_tokens = weight * batch, weight * tokens
    sums[0] += weight
    sums[1] += of_batch
    sums[2] += of_tokens
    sums[3] += weight * value
    sums[4] += of_batch * batch
    sums[5] += of_tokens * tokens
    sums[6] += of_batch * tokens
    sums[7] += of_batch * value
    sums[8] += of_tokens * value


def _line(sums: Sequence[float], running: float, tokens: float) -> float:
    """The value of the weighted least-squares plane at this batch and these context tokens.

    If the effects of batch and tokens cannot be told apart, the plane slopes along the batch only.
    More of either never makes a step faster, and a step never grows faster than its batch. A plane
    that violates this was fitted to times at which the machine ran at different speeds.
    """
    weight = sums[0]
    batch, token, value = sums[1] / weight, sums[2] / weight, sums[3] / weight
    bb, tt = _spread(sums[4] / weight, batch), _spread(sums[5] / weight, token)
    bt = sums[6] / weight - batch * token
    bv = sums[7] / weight - batch * value
    tv = sums[8] / weight - token * value
    if bt * bt < COLLINEAR * bb * tt:
        scale = bb * tt - bt * bt
        per_request, per_token = (bv * tt - tv * bt) / scale, (tv * bb - bv * bt) / scale
        at_none = value - per_request * batch - per_token * token
        if min(per_request, per_token, at_none) >= 0:
            return value + per_request * (running - batch) + per_token * (tokens - token)
    return value + _per_request(batch, value, bb, bv) * (running - batch)


def _per_request(batch: float, value: float, bb: float, bv: float) -> float:
    """The slope along the batch only, from means, variance and covariance."""
    return min(max(0.0, bv / bb), value / batch) if bb else 0.0


def _spread(square: float, mean: float) -> float:
    """The variance, computed from a mean square and a mean; 0 if it is only a rounding error."""
    variance = square - mean * mean
    return variance if variance > _SPREAD_MIN_RATIO * square else 0.0
