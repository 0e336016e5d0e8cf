"""The stream of a target turns live or recorded scrapes into diagnoses. I/O edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from msgspec import Struct

from kneewatch.agent.captures import PageReader, gpu_access
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.names.dcgm_fields import Gpus, resolve_gpus
from kneewatch.collector.page import Layout, Page
from kneewatch.collector.page_memory import PAGES
from kneewatch.diagnose.capacity import StatedServer
from kneewatch.diagnose.deployment.server_state import NO_STATE
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.counterfactual import with_counterfactuals
from kneewatch.diagnose.engine.target_monitor import Compare, JudgeRouter, TargetMonitor
from kneewatch.diagnose.engine.wording import in_own_words
from kneewatch.diagnose.gpu import GpuMonitor
from kneewatch.diagnose.learned.acceptance import Deviation
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.diagnose.verdict import Verdict

if TYPE_CHECKING:
    from kneewatch.agent.server.watch import ServerWatch
    from kneewatch.collector.http.fetch import Fetched, Fetcher, Scrape
    from kneewatch.diagnose.fleet.routers import Beside
    from kneewatch.diagnose.recommend.adviser import Adviser


T = TypeVar("T")


def finished(steps: Generator[bool, None, T]) -> T:
    """What steps return, after all of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("T", end.value)


ReadGpus = Callable[[float], GpuReading]
"""The newest signals of a target's GPUs at a time."""


def no_gpus(_now_s: float) -> GpuReading:
    """The reading of a target whose GPUs nothing reads."""
    return NO_GPUS


def target_monitor(name: str, profile: Profile, beside: Beside = tuple) -> TargetMonitor:
    """A monitor that recommends changes, explains causes, compares the engines of a page, and
    judges routers by the engines `beside` them."""

    def new_router(name: str, profile: Profile) -> JudgeRouter:
        # Imported here: most targets are engines, and this import is slow.
        from kneewatch.diagnose.fleet.routers import RouterPages

        return RouterPages(name, profile, beside).judged

    return TargetMonitor(
        name, profile, new_adviser, _new_comparison, new_router, in_own_words, with_counterfactuals
    )


def new_adviser(stated: StatedServer) -> Adviser:
    # Imported here: most servers need no advice, and this import is slow.
    from kneewatch.diagnose.recommend.adviser import Adviser

    return Adviser(stated)


def _new_comparison(scale: float) -> Compare:
    # Imported here: most pages have one engine, and this import is slow.
    from kneewatch.diagnose.engine.data_parallel import DataParallelEngines

    return DataParallelEngines(scale=scale).compared


class AcceptRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person accepts: the present values of a target's engines.

    `what`: families of signals, or all. Without `model` and `engine`: all engines. `dry_run`:
    nothing changes.
    """

    target: str
    model: str = ""
    engine: str = ""
    what: tuple[Literal["speed", "ttft", "itl", "prefix", "lengths", "load", "transfer"], ...] = ()
    dry_run: bool = False


class EngineAcceptance(Struct, frozen=True):
    """The values of one engine that were, or would be, accepted."""

    target: str
    model: str
    engine: str
    deviations: Sequence[Deviation] = ()


def accept(monitor: TargetMonitor, t_s: float, request: AcceptRequest) -> list[EngineAcceptance]:
    """Make the present values of the requested engines the usual ones."""
    return [
        EngineAcceptance(
            monitor.name,
            engine.key.model,
            engine.key.engine,
            engine.judge.accept(t_s, "accepted", request.what, dry_run=request.dry_run),
        )
        for engine in monitor.engines
        if request.model in ("", engine.key.model) and request.engine in ("", engine.key.engine)
    ]


class TargetStream:
    """One target's parser and monitor."""

    def __init__(
        self,
        name: str,
        profile: Profile,
        limits: Limits,
        beside: Beside = tuple,
    ) -> None:
        self._beside = beside
        self.monitor = target_monitor(name, profile, beside)
        self.gpus: ReadGpus = no_gpus
        self.server: ServerWatch | None = None
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context for the parsing of a page. The daemon replaces it."""
        self._pages = PageReader(limits)
        self._fetch_s: float | None = None
        self._recorded_gpus: RecordedGpus | None = None
        self._read_gpus = NO_GPUS
        self.server_state = NO_STATE
        """The state of the server after a failed scrape; NO_STATE after a successful one."""

    def reset(self) -> None:
        """Start with a new monitor, because the next scrapes come from another process."""
        name, profile = self.monitor.name, self.monitor.profile
        self.monitor = target_monitor(name, profile, self._beside)
        self._recorded_gpus = None

    def take(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None = None
    ) -> list[Verdict]:
        """The diagnoses after a page. An unreadable page counts as a failed scrape."""
        return self.judge(t_s, self._pages.page(t_s, body, content_type, status))

    def replay(self, entry: Entry) -> list[Verdict]:
        """The diagnoses after a recorded scrape."""
        return self.judge(entry.t_s, self.read(entry))

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or the error of that scrape. Pages must be read in
        order."""
        return self._pages.read(entry)

    def judge(self, t_s: float, page: Page | CollectError) -> list[Verdict]:
        """The diagnoses after a parsed page or, if `page` is an error, after a failed scrape."""
        diagnoses = finished(self.steps(t_s, page))
        self.update(t_s)
        return diagnoses

    def steps(self, t_s: float, page: Page | CollectError) -> Generator[bool, None, list[Verdict]]:
        """Judge in steps: yields before each that only needs the CPU. Call `update` afterwards."""
        if self.server is not None:
            self.server.read_log(t_s, self.monitor)
        if isinstance(page, CollectError):
            server = self.server
            state = NO_STATE if server is None else server.state(t_s, page, self.monitor)
            self.server_state = state
            return self.monitor.failed(t_s, page, state)
        self.server_state = NO_STATE
        yield True
        if page.gpus is not None:
            if self._recorded_gpus is None:
                self._recorded_gpus = RecordedGpus(self.monitor.profile.window_s)
            gpus = self._recorded_gpus.after(t_s, page.gpus)
        else:
            gpus = self.gpus(t_s)
        if page.host:
            self.monitor.set_host(page.host)
        self._read_gpus = gpus
        judge = self.monitor.read(t_s, page, gpus, fetch_s=self._fetch_s)
        yield True
        return judge()

    def update(self, t_s: float) -> None:
        """Read the facts about the server that are due. Call this after the page of `t_s` was
        judged; it may wait for the server."""
        if self.server is not None and self.monitor.last_error is None:
            self.server.update(t_s, self.monitor, self._read_gpus)

    def scrape(self, fetcher: Fetcher) -> list[Verdict]:
        """Scrape a live page once. Returns the diagnoses after that."""
        return self.scraped(fetcher.scrape(time.time()))

    def scraped(self, scrape: Scrape) -> list[Verdict]:
        """The diagnoses after a scrape that was fetched earlier."""
        return self.judge(scrape.t_s, self._served(scrape.t_s, scrape.answer))

    def fetch(self, fetcher: Fetcher, t_s: float) -> Page | CollectError:
        """Scrape a live page once at `t_s`. Returns the page, or the error."""
        return self._served(t_s, fetcher.scrape(t_s).answer)

    def _served(self, t_s: float, answer: Fetched | CollectError) -> Page | CollectError:
        if isinstance(answer, CollectError):
            return answer
        self._fetch_s = answer.duration_s
        # Who waits for its turn does not compute.
        with PAGES.in_turn(answer.body), self.computing():
            return self._pages.page(t_s, answer.body, answer.content_type, None)


class RecordedGpus:
    """The GPUs of a recorded server, from the pages in its capture."""

    def __init__(self, window_s: float) -> None:
        self._monitor = GpuMonitor(window_s=window_s)
        self._bound: tuple[Layout, Gpus] | None = None

    def after(self, t_s: float, page: Page) -> GpuReading:
        """The reading after a recorded page."""
        # Lazy: most recordings have no such page.
        from kneewatch.collector.gpu.page import GpuPage

        try:
            if self._bound is None or self._bound[0] is not page.layout:
                self._bound = page.layout, resolve_gpus(page.layout)
            self._monitor.take(t_s, GpuPage(page, self._bound[1]))
        except CollectError as error:
            self._monitor.failed(str(error))
        return self._monitor.reading(t_s)


GPU_INTERVAL_S = 10.0
"""dcgm-exporter collects every 30 s, so scraping it more often shows the same samples."""


class GpuStream:
    """Reads the DCGM exporter page with a target's GPUs."""

    def __init__(self, url: str, settings: FetchSettings, limits: Limits, window_s: float) -> None:
        # Lazy: recordings need no HTTP.
        from kneewatch.collector.gpu.page import DcgmCollector

        self.monitor = GpuMonitor(window_s=window_s)
        self._collector = DcgmCollector(url, settings, limits)

    def scrape(self) -> None:
        """Read the page once. An error appears in the diagnosis of the target."""
        t_s = time.time()
        try:
            self.monitor.take(t_s, self._collector.collect())
        except CollectError as error:
            self.monitor.failed(str(error))

    def close(self) -> None:
        self._collector.close()


def gpu_stream(targets: Sequence[str], settings: Settings, window_s: float) -> GpuStream | None:
    """The stream of the GPU page that is configured for these targets; None if none is."""
    access = gpu_access(targets, settings)
    return None if access is None else GpuStream(*access, settings.limits(), window_s)
