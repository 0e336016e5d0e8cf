"""A router as a target of its own: its page is judged without its engines. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from kneewatch.collector.samples import Layout, Page, Series
from kneewatch.collector.signals.expr import FOLDS
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.fleet.routers import (
    ASKED,
    OWN_MIN,
    PICKS_S,
    PINNED,
    QUEUED_S,
    REUSED,
    ROUTERS,
    TTFT_OVER_S,
    Asked,
    Router,
    RouterState,
    fault_of,
    parts_of,
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

METRICS = (*ASKED, "running", "saturation")
SELECTOR = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')

Track = Sequence[tuple[float, float]]
"""Times and values of one series."""

Fold = Callable[[Sequence[float]], float]


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
        answers = {
            question: self._answer(asked, getattr(router, question), router.endpoint)
            for question, asked in ASKED.items()
        }
        pinned = [self._answer(each, router.saturation).get("") for each in PINNED]
        reuse: dict[str, dict[str, float]] = {}
        for name in router.reuse:
            for model, tokens in self._answer(REUSED, name, "model").items():
                reuse.setdefault(model, {})[name] = tokens
        return RouterState(
            router,
            watched_s=self._watched_s,
            ready=answers["ready"].get(""),
            queue=answers["queue"].get(""),
            stale=answers["stale"].get("") if pinned == [1.0, 1.0] else None,
            rejected=answers["rejected"].get(""),
            ttft=self._mean(router.ttft, TTFT_OVER_S, 1.0),
            picks={} if router.rate else answers["picks"],
            health=answers["health"],
            breaker={name: state for name, state in answers["breaker"].items() if state > 0},
            own={
                name.partition("{")[0]: scale * mean
                for name, scale in router.own.items()
                if (mean := self._mean(name, PICKS_S, OWN_MIN)) is not None
            },
            reuse=reuse,
        )

    def _answer(self, asked: Asked, metric: str, apart_by: str = "") -> dict[str, float]:
        """The answer by endpoint; by "" if series are not kept apart. Empty without series."""
        over = asked.over
        if over == "increase":
            values = self._gained(metric, asked.seconds)
        else:
            values = self._held(metric, asked.seconds, FOLDS[over])
        groups: dict[str, list[float]] = {}
        for row, value in values.items():
            name = dict(row.labels).get(apart_by, "") if asked.apart else ""
            groups.setdefault(name, []).append(value)
        return {name: FOLDS[asked.fold](group) for name, group in groups.items()}

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
        return {row: fold([value for _, value in track]) for row, track in tracks.items()}

    def _gained(self, metric: str, over_s: float = PICKS_S) -> dict[Series, float]:
        """The increase of each counter; that of a new series began at 0."""
        first_s = self._scrapes[0][0]
        return {
            row: _increase(track) + (track[0][1] if track[0][0] > first_s else 0.0)
            for row, track in self._tracks(metric, over_s).items()
        }

    def _mean(self, histogram: str, over_s: float, least: float) -> float | None:
        """The mean of a histogram's observations, of at least so many."""
        gained = Asked("increase", over_s)
        total, count = (self._answer(gained, part).get("") for part in parts_of(histogram))
        return total / count if total is not None and count and count >= least else None


@cache
def _names(title: str) -> frozenset[str]:
    """The names of the samples that are read of a router."""
    router = next(each for each in ROUTERS if each.title == title)
    metrics = [each for name in METRICS if (each := getattr(router, name))]
    parts = [part for each in (*router.own, router.ttft) for part in parts_of(each)]
    return frozenset(each.partition("{")[0] for each in (*metrics, *router.reuse, *parts))


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
