"""Monitors one engine over time: reads its pages and judges their values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.page import Page
from kneewatch.collector.scrape_history import Restart
from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.deployment.server_state import CanaryState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import Judge
from kneewatch.diagnose.engine.reader import EngineReader
from kneewatch.diagnose.values import GpuReading, Values
from kneewatch.diagnose.verdict import Cause, LogFailure, Verdict
from kneewatch.rules.rule import LONG_WINDOWS

VANISHED_KEPT_S = 3600.0
"""Seconds for which an engine is still reported after it left a readable page.

If an orchestrator names the replicas, they are forgotten sooner, because they get replaced.
"""

UNREAD = "the page could not be read"
GONE = "the engine is not on the page"
"""Reasons why an engine could not be diagnosed."""


class EngineMonitor:
    """Monitors one engine over time: `reader` reads its pages, `judge` judges what was read."""

    def __init__(self, key: EngineKey, profile: Profile, judge: Judge) -> None:
        self.key, self.profile, self.judge = key, profile, judge
        self.reader = EngineReader(profile)
        self._vanished = 0
        self._appeared_s = float("-inf")
        self.newest: Verdict | None = None
        """The last diagnosis, also of an unreadable page; None before the first."""
        self.restart: Restart | None = None
        """The restart that the newest page showed; None without one."""
        self.host: Mapping[str, float] = {}
        """Signals of the server's process on this node; empty where it runs elsewhere."""
        self.canary: CanaryState | None = None
        """What canary requests to the server showed; None where none is sent."""
        self.generated_s = float("-inf")
        """Time of the newest page that showed more generated tokens than the one before."""

    def read(
        self,
        t_s: float,
        page: Page,
        binding: EngineBinding,
        process_start: int | None,
        gpus: GpuReading,
    ) -> Values | None:
        """The values of one scrape; None if the scrape is not newer than the last one."""
        is_first = self.reader.last_s == float("-inf")
        values = self.reader.read(
            t_s, page, binding, process_start, gpus=gpus, host=self.host, canary=self.canary
        )
        if values is None:
            return None
        if values.generated:
            self.generated_s = t_s
        if self._vanished or is_first:
            self._appeared_s = t_s
        self._vanished = 0
        self.restart = self.reader.restart
        return values

    def judged(self, t_s: float, values: Values) -> Verdict:
        """The diagnosis by the values that were read at `t_s`."""
        self.newest = diagnosis = self.judge.step(t_s, values)
        return diagnosis

    def vanished(self, t_s: float, present: Collection[EngineMonitor]) -> Verdict | None:
        """The diagnosis while the page is readable but lacks this engine; None once forgotten.

        `present` are the engines that are on the page.
        """
        successor = self._successor(present)
        kept_s = VANISHED_KEPT_S
        if successor is not None:
            kept_s = self.profile.window_s
        elif self.key.replica:
            kept_s = LONG_WINDOWS * self.profile.window_s
        if t_s - self.reader.last_s > kept_s:
            return None
        self._vanished += 1
        cause = observer.vanished(
            _engine_name(self.key),
            self._vanished,
            self.reader.last_s,
            successor=None if successor is None else _engine_name(successor.key),
        )
        return self.unreadable(t_s, cause, cause.evidence[0].text, seen=GONE)

    def _successor(self, present: Collection[EngineMonitor]) -> EngineMonitor | None:
        """The engine that replaced this one; None if none did.

        It is a newer engine with the same number and replica. If all engines on the page are newer,
        it may be any of them.
        """
        newcomers = [engine for engine in present if engine._appeared_s > self.reader.last_s]
        place = self.key.engine, self.key.replica
        replacements = [
            engine for engine in newcomers if (engine.key.engine, engine.key.replica) == place
        ]
        return next(
            iter(replacements or (newcomers if len(newcomers) == len(present) else ())), None
        )

    def unreadable(
        self,
        t_s: float,
        cause: Cause,
        why: str,
        *,
        seen: str = UNREAD,
        log: LogFailure | None = None,
    ) -> Verdict:
        """The diagnosis after a scrape without data of this engine.

        `log` is the failure that the server's log shows; None if it shows none.
        """
        self.restart = None
        self.newest = self.judge.unreadable(t_s, cause, why, seen, canary=self.canary, log=log)
        return self.newest


def _engine_name(key: EngineKey) -> str:
    return f"engine {key.engine} of {key.model}"
