"""From pages to diagnoses: one target over time. Pure: time comes with each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_resolver import Binding, resolve
from kneewatch.collector.names.vllm_series import EngineKey
from kneewatch.collector.samples import Layout, Page
from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.cardinality_limit import Room
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue, EngineMonitor
from kneewatch.diagnose.gpu.monitor import NO_GPUS, GpuReading

if TYPE_CHECKING:
    from kneewatch.diagnose.engine.data_parallel import Beside


class TargetMonitor:
    """One target over time: its engines, and the scrapes that failed."""

    def __init__(self, name: str, profile: Profile, catalogue: Catalogue | None = None) -> None:
        self.name, self.profile = name, profile
        self._catalogue = catalogue or Catalogue.of(profile)
        self._engines: dict[EngineKey, EngineMonitor] = {}
        self._bound: tuple[Layout, Binding] | None = None
        self._failures, self._failing_since_s = 0, 0.0
        self._room = Room()
        self._beside: Beside | None = None
        self.last_error: CollectError | None = None
        """Why the newest scrape gave nothing; None where it gave a page."""

    @property
    def engines(self) -> Collection[EngineMonitor]:
        """Those on the newest page, and those that left it a while ago."""
        return self._engines.values()

    def page(self, t_s: float, page: Page, gpus: GpuReading = NO_GPUS) -> list[Diagnosis]:
        """A diagnosis for each engine on the page; `gpus` are what the target's GPUs say."""
        try:
            binding = self._resolve(page)
        except CollectError as error:
            return self.failed(t_s, error)
        self._failures, self.last_error = 0, None
        found: list[Diagnosis] = []
        told = self._room.judged(binding.engines, self._engines)
        for key in self._room.leaving(told, self._engines):
            del self._engines[key]
        for engine in told:
            monitor = self._engines.get(engine.key)
            if monitor is None:
                monitor = EngineMonitor(self.name, engine.key, self.profile, self._catalogue)
                self._engines[engine.key] = monitor
            diagnosis = monitor.page(t_s, page, engine, binding.process_start, gpus)
            if diagnosis is not None:
                found.append(diagnosis)
        if len(found) > 1:
            found = self._among(t_s, found, [self._engines[engine.key] for engine in told])
        if len(told) < len(self._engines):
            found += self._vanished(t_s, [self._engines[engine.key] for engine in told])
        return self._with_limit(found)

    def _among(
        self, t_s: float, found: list[Diagnosis], engines: Sequence[EngineMonitor]
    ) -> list[Diagnosis]:
        """The diagnoses of engines that share a page, with what shows only side by side."""
        if self._beside is None:
            # Here: most pages have one engine, and what judges several takes a while to import.
            from kneewatch.diagnose.engine.data_parallel import Beside

            self._beside = Beside(scale=self.profile.scale)
        replicas = Counter((engine.key.model, engine.key.replica) for engine in engines)
        for engine in engines:
            engine.learned.workload.beside(replicas[engine.key.model, engine.key.replica])
        by_newest = {id(engine.newest): engine for engine in engines}
        among = self._beside.told(t_s, found)
        for before, after in zip(found, among, strict=True):
            by_newest[id(before)].newest = after
        return among

    def _with_limit(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """Diagnoses of which the first says once that there were more engines than are kept."""
        line = self._room.told_once() if found else None
        if line is not None:
            found[0] = replace(found[0], unknown=[line, *found[0].unknown])
        return found

    def _vanished(self, t_s: float, present: Sequence[EngineMonitor]) -> list[Diagnosis]:
        """Engines that are no longer on a page that can be read: told for a while, then
        forgotten."""
        found: list[Diagnosis] = []
        staying = {engine.key for engine in present}
        for key, engine in list(self._engines.items()):
            if key in staying:
                continue
            diagnosis = engine.gone(t_s, present)
            if diagnosis is None:
                del self._engines[key]
            else:
                found.append(diagnosis)
        return found

    def failed(self, t_s: float, error: CollectError) -> list[Diagnosis]:
        """A diagnosis for each engine known so far (or one for none) after a failed scrape."""
        if not self._failures:
            self._failing_since_s = t_s
        self._failures += 1
        self.last_error = error
        cause = observer.unreadable(error, self._failures, self._failing_since_s)
        engines = list(self._engines.values()) or [
            EngineMonitor(self.name, EngineKey("", ""), self.profile, self._catalogue)
        ]
        return [engine.unreadable(t_s, cause, str(error)) for engine in engines]

    def _resolve(self, page: Page) -> Binding:
        if self._bound is None or self._bound[0] is not page.layout:
            self._bound = (page.layout, resolve(page.layout))
        return self._bound[1]
