"""Reads the facts about a target's server: at the start, after a restart, hourly. I/O edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_facts import SourceReading, merge
from kneewatch.diagnose.engine.target_monitor import TargetMonitor

READ_EVERY_S = 3600.0
PROBE = "server.probe"
"""The setting that switches reading on."""

ReadServer = Callable[[str, FetchSettings, float], Sequence[SourceReading]]


def server_watch(address: str, settings: Settings) -> ServerWatch | None:
    """The watch of a server's facts; None where the settings switch it off."""
    return ServerWatch(address, settings.fetch()) if settings[PROBE] else None


def read_server(address: str, fetch: FetchSettings, now_s: float) -> Sequence[SourceReading]:
    """What the server says about itself, and what its process on this node shows."""
    # Lazy: most commands read no server.
    from kneewatch.agent.server.model_file import read_model
    from kneewatch.agent.server.probe import ask_server
    from kneewatch.agent.server.process import read_process

    readings = [ask_server(address, fetch, now_s)]
    shown, server = read_process(address, now_s)
    readings.append(shown)
    if server is not None:
        readings.append(read_model(server, now_s))
    return readings


class ServerWatch:
    """The facts about one target's server. Reads them only after a page of a vLLM."""

    def __init__(
        self, address: str, fetch: FetchSettings, *, read: ReadServer = read_server
    ) -> None:
        self._address, self._fetch, self._read = address, fetch, read
        self._read_s = -math.inf
        self._readings: Sequence[SourceReading] = ()
        self._merged_of: object = None
        self._settings_s: float | None = None

    def update(self, t_s: float, monitor: TargetMonitor) -> None:
        """Read what is due, and give the facts to the monitor, after its page of `t_s`."""
        if self._settings_s is None:
            self._settings_s = t_s
        engines = [engine for engine in monitor.engines if engine.last_s == t_s]
        if monitor.last_error is not None or not engines:
            return
        restarted = any(engine.restart is not None for engine in engines)
        # A clock that was set back must not delay the next reading.
        if restarted or not 0 <= t_s - self._read_s < READ_EVERY_S:
            self._readings, self._read_s = self._read(self._address, self._fetch, t_s), t_s
        config = next((e.config for e in engines if e.config), dict[str, str]())
        names = sorted({engine.key.model for engine in engines if engine.key.model})
        stated: Stated = monitor.profile.stated
        merged_of = (self._readings, dict(config), names, monitor)
        if merged_of == self._merged_of:
            return
        self._merged_of = merged_of
        facts, completed = merge(
            stated,
            self._readings,
            config=config,
            model_names=names,
            settings_s=self._settings_s,
            page_s=t_s,
        )
        monitor.set_server(facts, completed)
