"""Targets, pages and parts of a daemon for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kneewatch.agent.daemon.cycle import Sinks, TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.settings.effective import Effective, Settings, load
from kneewatch.agent.store.records import Cycle
from kneewatch.agent.target_state import Board, TargetState
from kneewatch.agent.targets import TargetSpec, argument_specs
from tests.waiting import PATIENCE_S


def settings(file: Path | None = None, **values: Any) -> Settings:  # noqa: ANN401
    """Settings of a daemon; keyword arguments are keys with __ for the dot."""
    loaded = load(
        file=file,
        environ={},
        flags={},
        defaults={
            "interval_s": 5.0,
            "server.probe": False,
            "fetch.connect_timeout_s": PATIENCE_S,
            "fetch.read_timeout_s": PATIENCE_S,
        },
    )
    return loaded.with_values(
        {key.replace("__", "."): Effective(value, "test") for key, value in values.items()}
    )


def target(address: str, **values: Any) -> TargetSpec:  # noqa: ANN401
    """One target with these settings."""
    (spec,) = argument_specs([address], settings(**values))
    return spec


class Kept:
    """A store and a notifier that keep what they are given."""

    def __init__(self) -> None:
        self.cycles: list[Cycle] = []
        self.states: list[TargetState] = []
        self.board = Board()
        self.heavy = set[str]()

    def sinks(self, gpus: GpuSources | None = None) -> Sinks:
        """Everything goes here."""
        return Sinks(self.board, self.cycles.append, self.states.append, gpus, heavy=self.heavy)


def watch(
    spec: TargetSpec,
    kept: Kept,
    *,
    gpus: GpuSources | None = None,
    **more: Any,  # noqa: ANN401
) -> TargetWatch:
    """A target under watch."""
    return TargetWatch(spec, target_profile(spec.settings), kept.sinks(gpus), **more)
