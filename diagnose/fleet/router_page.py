"""A router as a target of its own: its page is judged without its engines. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from kneewatch.collector.samples import Layout, Page, Series
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.fleet.routers import (
    OWN_MIN,
    PICKS_S,
    QUEUED_S,
    ROUTERS,
    TTFT_OVER_S,
    UNREADY_S,
    Router,
    RouterState,
    fault_of,
)
from kneewatch.diagnose.verdict import NO_STAGE, Verdict
from kneewatch.rules.rule import OK

NO_ENGINES = (
    f"{NO_STAGE}a router has no KV cache",
    "engines: a router's page does not show whether its engines have room; give their addresses "
    "too, or --prometheus",
)
MOST_OF = 0.9
"""Share of a time that must have been watched; the first and last scrape are slightly off."""

METRICS = (
    "ready",
    "queue",
    "running",
    "picks",
    "health",
    "breaker",
    "stale",
    "saturation",
    "rejected",
)
SELECTOR = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')

Track = Sequence[tuple[float, float]]
"""Times and values of one series."""

Fold = Callable[[Iterable[float]], float]


def router_of(layout: Layout) -> Router | None:
    """The router whose page this is; None if it is none that is read."""
    names = {series.name for series in layout.series}
    return next(
        (each for each in ROUTERS if any(name.startswith(each.prefixes) for name in names)), None
    )


class RouterPages:
    """The pages of a router over the last minutes."""

    def __init__(self, name: str, profile: Profile) -> None:
        self._name, self._scale = name, profile.scale
        self._scrapes: deque[tuple[float, Mapping[Series, float]]] = deque()
        self._tracker = CauseTracker[Cause](scale=profile.scale)

    def judged(self, t_s: float, page: Page) -> Verdict | None:
        """The verdict on the router after a page; None if it is no router's page."""
        router = router_of(page.layout)
        if router is None:
            return None
        names = _names(router.title)
        self._scrapes.append(
            (t_s, {row: value for row, value in page.samples() if row.name in names})
        )
        while t_s - self._scrapes[0][0] > PICKS_S:
            self._scrapes.popleft()
        fault = fault_of(self._state(router))
        # What is concluded has held for its time already.
        concluded = [] if fault is None else [fault]
        causes = self._tracker.update(t_s, concluded, developed=[each.id for each in concluded])
        severity = max((cause.severity for cause in causes), default=OK)
        values = {
            "running": _total(self._newest(router.running)),
            "waiting": _total(self._newest(router.queue)),
        }
        return Verdict(
            t_s=t_s,
            target=self._name,
            program=router.title,
            health=severity.word,
            causes=causes,
            values=values,
            unknown=NO_ENGINES,
            window_s=self._watched_s,
            judged_against="nothing: latency is judged at the engines",
        )

    @property
    def _watched_s(self) -> float:
        return self._scrapes[-1][0] - self._scrapes[0][0]

    def _state(self, router: Router) -> RouterState:
        """What the pages show. A condition must have held for its time, scaled as those of
        rules."""
        stale = self._held(router.stale, QUEUED_S, min)
        saturated = {
            value
            for fold in (min, max)
            for value in self._held(router.saturation, QUEUED_S, fold).values()
        }
        health = self._by_endpoint(router, self._held(router.health, QUEUED_S, max))
        breaker = self._by_endpoint(router, self._held(router.breaker, QUEUED_S, min))
        return RouterState(
            router,
            watched_s=self._watched_s,
            ready=_total(self._held(router.ready, UNREADY_S, max)),
            queue=_total(self._held(router.queue, QUEUED_S, min)),
            stale=_total(stale) if saturated == {1.0} else None,
            rejected=_total(self._gained(router.rejected)),
            ttft=self._mean(router.ttft, TTFT_OVER_S, 1.0),
            picks={} if router.rate else self._by_endpoint(router, self._gained(router.picks)),
            health=health,
            breaker={name: state for name, state in breaker.items() if state > 0},
            own={
                name.partition("{")[0]: scale * mean
                for name, scale in router.own.items()
                if (mean := self._mean(name, PICKS_S, OWN_MIN)) is not None
            },
            reuse=self._reuse(router),
        )

    def _reuse(self, router: Router) -> dict[str, dict[str, float]]:
        """The increase of the counters of reuse, by model."""
        by_model: dict[str, dict[str, float]] = {}
        for name in router.reuse:
            for row, tokens in self._gained(name).items():
                own = by_model.setdefault(dict(row.labels).get("model", ""), {})
                own[name] = own.get(name, 0.0) + tokens
        return by_model

    def _tracks(self, metric: str, over_s: float) -> dict[Series, list[tuple[float, float]]]:
        """The series of a metric over the last seconds."""
        tracks: dict[Series, list[tuple[float, float]]] = {}
        match = SELECTOR.fullmatch(metric)
        if match is None:
            return tracks
        matchers = MATCHER.findall(match[2] or "")
        end_s = self._scrapes[-1][0]
        for t_s, samples in self._scrapes:
            for row, value in samples.items() if end_s - t_s <= over_s else ():
                if row.name == match[1] and _selects(matchers, dict(row.labels)):
                    tracks.setdefault(row, []).append((t_s, value))
        return tracks

    def _newest(self, metric: str) -> dict[Series, float]:
        return {row: track[-1][1] for row, track in self._tracks(metric, 0.0).items()}

    def _held(self, metric: str, over_s: float, fold: Fold) -> dict[Series, float]:
        """Each series' least or greatest value over some seconds, as far as they were watched; none
        before most of a window has passed."""
        if self._watched_s < MOST_OF * QUEUED_S * self._scale:
            return {}
        tracks = self._tracks(metric, over_s * self._scale)
        return {row: fold(value for _, value in track) for row, track in tracks.items()}

    def _gained(self, metric: str, over_s: float = PICKS_S) -> dict[Series, float]:
        """The increase of each counter; that of a new series began at 0."""
        first_s = self._scrapes[0][0]
        return {
            row: _increase(track) + (track[0][1] if track[0][0] > first_s else 0.0)
            for row, track in self._tracks(metric, over_s).items()
        }

    def _mean(self, histogram: str, over_s: float, least: float) -> float | None:
        """The mean of a histogram's observations, of at least so many."""
        name, brace, matchers = histogram.partition("{")
        total, count = (
            _total(self._gained(f"{name}_{part}{brace}{matchers}", over_s))
            for part in ("sum", "count")
        )
        return total / count if total is not None and count and count >= least else None

    def _by_endpoint(self, router: Router, values: Mapping[Series, float]) -> dict[str, float]:
        endpoints: dict[str, float] = {}
        for row, value in values.items():
            name = dict(row.labels).get(router.endpoint, "")
            endpoints[name] = endpoints.get(name, 0.0) + value
        return endpoints


@cache
def _names(title: str) -> frozenset[str]:
    """The names of the samples that are read of a router."""
    router = next(each for each in ROUTERS if each.title == title)
    metrics = [each for name in METRICS if (each := getattr(router, name))]
    histograms = [each.partition("{")[0] for each in (*router.own, router.ttft)]
    return frozenset(
        (
            *(each.partition("{")[0] for each in (*metrics, *router.reuse)),
            *(f"{each}_{part}" for each in histograms for part in ("sum", "count")),
        )
    )


def _total(values: Mapping[Series, float]) -> float | None:
    """The sum over all series; None if there are none."""
    return sum(values.values()) if values else None


def _increase(track: Track) -> float:
    """The increase of a counter. After a reset it began at 0."""
    pairs = pairwise(track)
    return sum(after - before if after >= before else after for (_, before), (_, after) in pairs)


def _selects(matchers: Sequence[tuple[str, str, str]], labels: Mapping[str, str]) -> bool:
    tests: Mapping[str, Callable[[str, str], bool]] = {
        "=": lambda text, wanted: text == wanted,
        "!=": lambda text, wanted: text != wanted,
        "=~": lambda text, wanted: re.fullmatch(wanted, text) is not None,
    }
    return all(tests[sign](labels.get(name, ""), text) for name, sign, text in matchers)
