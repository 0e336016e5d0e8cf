"""What the HTTP endpoint answers from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kneewatch.agent.board import Board
from kneewatch.agent.settings import Settings
from kneewatch.agent.targets import TargetSpec

if TYPE_CHECKING:
    # Their packages import this module.
    from kneewatch.agent.fleet.watch import FleetWatch
    from kneewatch.agent.notify.notifier import Notifier
    from kneewatch.agent.store.reader import Reader
    from kneewatch.agent.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The running daemon as a request sees it. `reader` and `store` are None where no history is
    kept, `notifier` where nobody is told, `fleet` where no metrics system is asked. `targets` gives
    what is configured now, `restart_needed` the keys of settings that were read and are not in
    force."""

    board: Board
    settings: Settings
    targets: Callable[[], Sequence[TargetSpec]]
    version: str
    started_s: float
    reader: Reader | None = None
    store: Store | None = None
    notifier: Notifier | None = None
    fleet: FleetWatch | None = None
    restart_needed: Callable[[], Sequence[str]] = tuple
    clock: Callable[[], float] = time.time
