"""Made-up weeks from recorded pages: daily and weekly load, incidents at known times, as a store.

    python -m tests.weeks FILE [--days 7] [--every 280] [--to T]

Each server repeats what a recorded one counted in a phase, times how busy the hour is, drawn anew
(Poisson): real layouts, real shapes, no repeats. Through an incident the recording's own phases are
played, scraped every 5 s. The real monitor judges each page, the real store keeps it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.captures import capture_name
from kneewatch.agent.store.records import Cycle, EngineCycle, Retention, engine_cycles
from kneewatch.agent.store.writer import Store
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.rules.facts import Targets
from tests.recordings import CAPTURES

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

DAY_S, HOUR_S, MINUTE_S = 86_400.0, 3600.0, 60.0
START_S = datetime(2026, 11, 9, tzinfo=UTC).timestamp()
"""A Monday."""

TTFT_S, ITL_S = 5.0, 0.5
PROFILE = Profile(targets=Targets(ttft_p99_s=TTFT_S, itl_p99_s=ITL_S))
CHAT_TTFT_S = 2.0
"""The TTFT target of a server for chats, which the planted overload breaks: its requests wait 2 s,
and TTFT P99 is 2.5 s. Against 5 s nothing is wrong with it."""

FINE_S = 5.0
EVERY_S = 280.0
"""Between incidents: two scrapes are in the longest window, and a week takes seconds to make."""

BEFORE_S, AFTER_S = 5 * MINUTE_S, 5 * MINUTE_S
"""Around an incident it is scraped as often as in it."""

NO_GAUGE = ("_total", "_sum", "_count", "_bucket", "_created", "_info", "_start_time_seconds")
OF_PROCESS = ("process_", "python_", "http_")


class Rates(Struct, frozen=True):
    """What a recorded server counted a second. Shapes: `counters` (counters,), `observed`
    (buckets,), each bucket's own, `means` (histograms,); `gauges` (gauges,) at the end of it."""

    counters: Floats
    observed: Floats
    means: Floats
    gauges: Floats


class Recording:
    """A recording's page, and what its server counted from page to page."""

    def __init__(self, name: str) -> None:
        path = CAPTURES / f"{name}.jsonl.gz"
        stream = TargetStream(capture_name(path), PROFILE, Limits())
        read = [
            (entry.t_s, page)
            for entry in CaptureReader(path)
            if isinstance(page := stream.read(entry), Page)
        ]
        self.layout: Layout = read[-1][1].layout
        series = self.layout.series
        at = {series_key: place for place, series_key in enumerate(series)}
        self.counters = _places(series, lambda n: n.endswith("_total"))
        self.gauges = _places(series, lambda n: not n.endswith(NO_GAUGE))
        self.born = _places(series, lambda n: n.endswith("_created") or "start_time" in n)
        self.buckets = _places(series, lambda n: n.endswith("_bucket"))
        groups = [_histogram(series[int(place)]) for place in self.buckets]
        names = list(dict.fromkeys(groups))
        self.group = np.array([names.index(group) for group in groups])
        self.first = np.array([groups.index(name) for name in names])
        self.sums = np.array([at[Series(f"{n}_sum", labels)] for n, labels in names])
        self.counts = np.array([at[Series(f"{n}_count", labels)] for n, labels in names])
        index_by_series = {series_key: index for index, series_key in enumerate(series)}
        self.times: list[float] = []
        self.pages: list[Floats] = []
        for t_s, page in read:
            values = np.full(len(series), np.nan)
            for series_key, value in page.samples():
                if series_key in index_by_series:
                    values[index_by_series[series_key]] = value
            self.times.append(t_s)
            self.pages.append(values)

    def rates(self, first: int, last: int) -> Rates:
        """What was counted from one page to another, a second."""
        before, after = np.nan_to_num(self.pages[first]), np.nan_to_num(self.pages[last])
        lasted_s = self.times[last] - self.times[first]
        rise = np.maximum(after - before, 0.0) / lasted_s
        cumulative = rise[self.buckets]
        own = np.diff(cumulative, prepend=0.0)
        own[self.first] = cumulative[self.first]
        count = rise[self.counts]
        means = np.divide(rise[self.sums], count, out=np.zeros_like(count), where=count > 0)
        return Rates(rise[self.counters], np.maximum(own, 0.0), means, after[self.gauges])

    def phase(self, name: str, labels: Mapping[str, Any]) -> tuple[int, int]:
        """The pages of a phase, without its beginning."""
        row = next(row for row in labels["phases"] if row["name"] == name)
        inside = [
            place
            for place, t_s in enumerate(self.times)
            if row["from_t"] + row["settle_s"] <= t_s <= row["to_t"]
        ]
        return inside[0], inside[-1]


def _places(series: Sequence[Series], wanted: Callable[[str], bool]) -> Places:
    return np.array(
        [
            place
            for place, of_series in enumerate(series)
            if wanted(of_series.name)
            and (not of_series.name.startswith(OF_PROCESS) or "start_time" in of_series.name)
        ],
        dtype=np.intp,
    )


def _histogram(series: Series) -> tuple[str, tuple[tuple[str, str], ...]]:
    labels = tuple(pair for pair in series.labels if pair[0] != "le")
    return series.name.removesuffix("_bucket"), labels


@cache
def recording(name: str) -> Recording:
    """A recording, read once."""
    return Recording(name)


@cache
def labelled() -> Mapping[str, Any]:
    """What was true in the recordings."""
    labels_by_capture: Mapping[str, Any] = json.loads((CAPTURES / "labels.json").read_text())
    return labels_by_capture


@cache
def steady(name: str, phase: str) -> Rates:
    """A phase of a recording as one."""
    first, last = recording(name).phase(phase, labelled()[name])
    return recording(name).rates(first, last)


@cache
def steps(name: str, phase: str) -> tuple[Rates, ...]:
    """A phase of a recording page by page."""
    first, last = recording(name).phase(phase, labelled()[name])
    return tuple(recording(name).rates(at, at + 1) for at in range(first, last))


class Planted(Struct, frozen=True):
    """An incident of a made-up week. `phases` are played one after the other, for so long each;
    `down_s`: no answer for so long, then a new process; 0 with no phases: a restart between two
    scrapes."""

    target: str
    cause: str
    start_s: float
    phases: tuple[tuple[str, float], ...] = ()
    down_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When the last phase is over."""
        return self.start_s + self.down_s + sum(lasts_s for _, lasts_s in self.phases)

    def phase(self, t_s: float) -> tuple[str, float] | None:
        """The phase at a time, and since when it is played."""
        since_s = self.start_s
        for name, lasts_s in self.phases:
            if since_s <= t_s < since_s + lasts_s:
                return name, since_s
            since_s += lasts_s
        return None


class Kind(Struct, frozen=True):
    """A kind of server: its recording, and its healthy phases from the quietest on, each with the
    load from which on it is played (0 to 1). Between two of them one is drawn."""

    recording: str
    healthy: tuple[tuple[float, str], ...]
    scaled: bool = False


CHAT = Kind("knee_sweep", ((0.0, "c1"), (0.2, "c2"), (0.4, "c4"), (0.6, "c8"), (0.8, "c16"),
                           (1.0, "c32")))  # fmt: skip
TIGHT = Kind("kv_pressure_cascade", ((0.0, "healthy"),), scaled=True)
SHARED = Kind("prefix_lost", ((0.0, "prefix_ok"),), scaled=True)
DRAFTING = Kind("spec_mixed", ((0.0, "repetitive"),), scaled=True)


def busy(t_s: float) -> float:
    """How busy an hour is, from 0 to 1: days and nights, and quiet weekends."""
    day = 0.5 - 0.5 * math.cos(2 * math.pi * ((t_s - 4 * HOUR_S) % DAY_S) / DAY_S)
    weekend = datetime.fromtimestamp(t_s, UTC).weekday() >= 5
    return day * (0.45 if weekend else 1.0)


@dataclass(slots=True)
class Server:
    """One server's pages over a week, and what the program makes of each.

    With `judged_s` it is judged no more often than that where nothing is planted: what was last
    said stands for the scrapes between. `there` is when it is scraped at all.
    """

    name: str
    kind: Kind
    labels: Mapping[str, str]
    planted: Sequence[Planted] = ()
    seed: int = 0
    profile: Profile = PROFILE
    judged_s: float = 0.0
    there: tuple[float, float] = (-math.inf, math.inf)
    _rng: np.random.Generator = field(init=False)
    _values: Floats = field(init=False)
    _stream: TargetStream = field(init=False)
    _last_s: float = field(init=False, default=-math.inf)
    _restarted: set[float] = field(init=False, default_factory=set[float])
    _judged: tuple[float, tuple[EngineCycle, ...]] = field(init=False, default=(-math.inf, ()))

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._values = np.zeros(0)
        self._stream = TargetStream(self.name, self.profile, Limits())

    def cycle(self, t_s: float) -> Cycle:
        """The cycle at a time."""
        page = self._page(t_s)
        judged_s, said = self._judged
        if isinstance(page, Page) and t_s - judged_s < self.judged_s and not self.near(t_s):
            return self._unjudged(t_s, page, said)
        diagnoses = self._stream.judge(t_s, page)
        tier = self.labels.get("tier")
        tiered = tuple(replace(diagnosis, tier=tier) for diagnosis in diagnoses)
        error = self._stream.monitor.last_error
        engines = engine_cycles(diagnoses, tiered, self._stream.monitor, None)
        self._judged = (t_s, engines)
        text = None if error is None else str(error)
        return Cycle(t_s, self.name, self.labels, engines, text)

    def near(self, t_s: float) -> bool:
        """Whether something planted is at hand."""
        return any(
            problem.start_s - BEFORE_S <= t_s < problem.end_s + AFTER_S for problem in self.planted
        )

    def _unjudged(self, t_s: float, page: Page, said: tuple[EngineCycle, ...]) -> Cycle:
        monitor = next(iter(self._stream.monitor.engines))
        columns = monitor.reader.counters()[0]
        values = tuple(monitor.reader.history.counters.read([*page.values, math.nan]))
        engines = tuple(
            replace(
                replayed,
                diagnosis=replace(replayed.diagnosis, t_s=t_s),
                columns=columns,
                counters=values,
                restart=None,
            )
            for replayed in said
        )
        return Cycle(t_s, self.name, self.labels, engines)

    def _page(self, t_s: float) -> Page | CollectError:
        for problem in self.planted:
            if problem.start_s <= t_s < problem.start_s + problem.down_s:
                return CollectError("connection refused", kind="refused", hint="Is it running?")
            born_s = problem.start_s + problem.down_s
            if not problem.phases and t_s >= born_s and born_s not in self._restarted:
                self._restarted.add(born_s)
                self._begin(born_s)
        if not len(self._values):
            self._begin(t_s)
        self._advance(t_s)
        return Page(recording(self.kind.recording).layout, self._values.tolist())

    def _begin(self, t_s: float) -> None:
        recorded = recording(self.kind.recording)
        self._values = np.zeros(len(recorded.layout.series))
        self._values[recorded.born] = t_s
        for at, series in enumerate(recorded.layout.series):
            if series.name.endswith("_info"):
                self._values[at] = 1.0
        self._last_s = t_s

    def _advance(self, t_s: float) -> None:
        recorded, rng = recording(self.kind.recording), self._rng
        rates, factor = self._rates(t_s)
        lasted_s = factor * (t_s - self._last_s)
        self._last_s = t_s
        values = self._values
        values[recorded.counters] += rng.poisson(rates.counters * lasted_s)
        own = rng.poisson(rates.observed * lasted_s)
        summed = np.cumsum(own)
        below = np.append(0, summed)[recorded.first][recorded.group]
        cumulative = summed - below
        values[recorded.buckets] += cumulative
        count = np.bincount(recorded.group, own)
        values[recorded.counts] += count
        values[recorded.sums] += count * rates.means
        whole = rates.gauges == np.round(rates.gauges)
        scaled = rates.gauges * min(1.5, factor)
        most = np.where(rates.gauges <= 1.0, 1.0, np.inf)
        values[recorded.gauges] = np.where(whole, np.round(scaled), np.minimum(scaled, most))

    def _rates(self, t_s: float) -> tuple[Rates, float]:
        """What is counted now, and how much of it."""
        name = self.kind.recording
        for problem in self.planted:
            phase = problem.phase(t_s)
            if phase is not None:
                played = steps(name, phase[0])
                return played[int((t_s - phase[1]) / 2.0) % len(played)], 1.0
        load = busy(t_s)
        if self.kind.scaled:
            return steady(name, self.kind.healthy[0][1]), 0.4 + 0.6 * load
        levels = self.kind.healthy
        at = max(place for place, (least, _) in enumerate(levels) if least <= load)
        if at + 1 < len(levels):
            least, most = levels[at][0], levels[at + 1][0]
            at += int(self._rng.random() < (load - least) / (most - least))
        played = steps(name, levels[at][1])
        # Gauges differ from page to page; what is counted is the phase's own mean.
        drawn = played[int(self._rng.integers(len(played)))].gauges
        return replace(steady(name, levels[at][1]), gauges=drawn), 1.0


class Week(Struct, frozen=True):
    """Servers over some days."""

    servers: tuple[Server, ...]
    start_s: float
    end_s: float

    @property
    def planted(self) -> list[Planted]:
        """All incidents, by their start."""
        problems = [problem for server in self.servers for problem in server.planted]
        return sorted(problems, key=lambda problem: problem.start_s)

    def cycles(self, every_s: float) -> Iterator[Cycle]:
        """The cycles of all servers in the order of time."""
        times = [
            (t_s, place)
            for place, server in enumerate(self.servers)
            for t_s in self._times(server, every_s, phase_s=0.37 * place)
        ]
        for t_s, place in sorted(times):
            yield self.servers[place].cycle(t_s)

    def _times(self, server: Server, every_s: float, *, phase_s: float) -> Iterator[float]:
        t_s = max(self.start_s, server.there[0]) + phase_s
        while t_s < min(self.end_s, server.there[1]):
            yield t_s
            soon_s = min(
                (problem.start_s - BEFORE_S - t_s for problem in server.planted
                 if problem.start_s - BEFORE_S > t_s),
                default=math.inf,
            )  # fmt: skip
            t_s += FINE_S if server.near(t_s) else max(FINE_S, min(every_s, soon_s))

    def write(self, path: Path, *, every_s: float) -> int:
        """Write the week as a store. Returns how many cycles it took."""
        now_s = self.start_s
        store = Store.open(path, retention=Retention(), clock=lambda: now_s)
        written = 0
        for cycle in self.cycles(every_s):
            now_s = cycle.t_s
            store.put(cycle)
            written += 1
            while store.stats().queued > 200:
                store.flush()
                time.sleep(0.001)
        store.close(60.0)
        stats = store.stats()
        if stats.dropped or stats.last_error or stats.queued:
            raise RuntimeError(f"not all was written: {stats}")
        return written


def at(day: int, hour: float, start_s: float = START_S) -> float:
    """A time of the week."""
    return start_s + day * DAY_S + hour * HOUR_S


def cascade(target: str, start_s: float) -> Planted:
    """KV pressure through all stages, and out of it."""
    return Planted(
        target, "kv_pressure", start_s,
        (("kv_near_full", 120.0), ("preempting", 240.0), ("queue_growth", 240.0),
         ("draining", 60.0)),
    )  # fmt: skip


def week(*, start_s: float = START_S, days: float = 7.0) -> Week:
    """The week of the tests: three tiers, four servers, an incident of each kind. Two servers come
    in midweek, one of them leaves again."""
    plan = {
        "chat-0": [
            Planted("chat-0", "queue_saturation", at(1, 14, start_s), (("c128", 480.0),)),
            Planted("chat-0", "target_down", at(2, 9.5, start_s), down_s=240.0),
        ],
        "tight-0": [cascade("tight-0", at(3, 15.25, start_s))],
        "shared-0": [
            Planted("shared-0", "prefix_reuse_lost", at(4, 11, start_s),
                    (("prefix_lost", 720.0),)),
            Planted("shared-0", "engine_restarted", at(5, 6, start_s)),
        ],
        "draft-0": [
            Planted("draft-0", "spec_decode_poor", at(1, 20, start_s),
                    (("mostly_sampled", 1200.0),)),
        ],
    }  # fmt: skip
    kinds = {"chat": CHAT, "tight": TIGHT, "shared": SHARED, "draft": DRAFTING}
    tiers = {"chat": "h100", "tight": "h200", "shared": "h100", "draft": "b200"}
    profiles = {"chat-0": Profile(targets=replace(PROFILE.targets, ttft_p99_s=CHAT_TTFT_S))}
    there = {
        "draft-0": (at(1, 12.5, start_s), at(2, 18, start_s)),
        "shared-0": (at(3, 20, start_s), math.inf),
    }
    end_s = start_s + days * DAY_S
    servers = tuple(
        Server(
            name,
            kinds[name.partition("-")[0]],
            {"tier": tiers[name.partition("-")[0]], "node": "n1"},
            [problem for problem in planted if problem.end_s < end_s],
            seed=place,
            profile=profiles.get(name, PROFILE),
            there=there.get(name, (-math.inf, math.inf)),
        )
        for place, (name, planted) in enumerate(plan.items())
    )
    return Week(servers, start_s, end_s)


def main() -> None:
    """Write a week."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--every", type=float, default=EVERY_S)
    parser.add_argument("--to", type=float, default=START_S + 7 * DAY_S)
    args = parser.parse_args()
    began_s = time.monotonic()
    planned_week = week(start_s=args.to - args.days * DAY_S, days=args.days)
    written = planned_week.write(args.file, every_s=args.every)
    print(f"{written} scrapes in {time.monotonic() - began_s:.0f} s: {args.file}")
    for problem in planned_week.planted:
        begins = f"{datetime.fromtimestamp(problem.start_s, UTC):%a %H:%M}"
        print(f"{begins} {problem.target} {problem.cause}")


if __name__ == "__main__":
    main()
