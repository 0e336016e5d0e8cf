"""Health signals of each GPU over time, and the meaning of NVIDIA's XID errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kneewatch.collector.history import History
from kneewatch.collector.names.dcgm_fields import GpuFields, GpuKey
from kneewatch.collector.signals.gpu import DEV, health_signals
from kneewatch.collector.signals.signal import SignalSet
from kneewatch.collector.window import Window

RESET = "reset the GPU"
REBOOT = "reboot the node"
RESTART = "restart the server; the GPU can wait for its next reset"
DRAINED = "reset the GPU once nothing runs on it"
REPLACE = "reset the GPU and have it replaced if it comes back"
LINK = "reset all GPUs of that NVLink fabric; look at cables, bridges and NVSwitches if it returns"


@dataclass(frozen=True, slots=True)
class Xid:
    """One number. `urgent`: work on that GPU is lost or wrong until the action is taken."""

    code: int
    meaning: str
    action: str
    urgent: bool = True


TABLE = (
    Xid(46, "the GPU stopped processing", RESET),
    Xid(48, "an uncorrectable (double bit) memory error", RESET),
    Xid(61, "the GPU's microcontroller hit a breakpoint", RESET),
    Xid(62, "the GPU's microcontroller halted", RESET),
    Xid(63, "a memory row was marked to be remapped", DRAINED, False),
    Xid(64, "a memory row could not be remapped", REPLACE),
    Xid(74, "an NVLink error", LINK),
    Xid(79, "the GPU has fallen off the bus", REBOOT),
    Xid(92, "many single bit memory errors", DRAINED, False),
    Xid(94, "an uncorrectable memory error, contained to one program", RESTART),
    Xid(95, "an uncorrectable memory error, not contained", RESET),
    Xid(109, "the GPU did not switch contexts in time", RESET),
    Xid(110, "a security fault", RESET),
    Xid(119, "the GPU's system processor (GSP) did not answer", RESET),
    Xid(120, "an error of the GPU's system processor (GSP)", RESET),
    Xid(140, "a memory error that could not be recovered", RESET),
    Xid(143, "the GPU could not be initialised", RESET),
    *(
        Xid(code, f"an NVLink error ({unit})", LINK)
        for code, unit in (
            (144, "SAW"),
            (145, "RLW"),
            (146, "TLW"),
            (147, "TREX"),
            (148, "NVLPW"),
            (149, "NETIR"),
            (150, "MSE"),
        )
    ),
)

XIDS: Mapping[int, Xid] = MappingProxyType({xid.code: xid for xid in TABLE})
"""The XIDs that speak of the GPU itself, by number."""

RECOVERY: Mapping[int, str] = MappingProxyType(
    {
        1: RESET,
        2: REBOOT,
        3: "drain the work that reaches other GPUs through it",
        4: "drain it, then reset it",
    }
)
"""What the driver itself asks for: nvmlDeviceGpuRecoveryAction_t of nvml.h; 0 is nothing."""


# --- What bears on the health of each GPU by itself, over time ------------------------------------


XID = DEV + "XID_ERRORS"
XID_COUNTER = "DCGM_EXP_XID_ERRORS_TOTAL"
XID_IN_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"

XID_KEPT_S = 600.0
"""An XID that is no longer the last one counts for so long: another may follow at once."""


@dataclass(frozen=True, slots=True)
class XidSeen:
    """An XID that a GPU reported. `since_s` is None where it stood there at the first look."""

    code: int
    since_s: float | None


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU now: the signals of collector/signals/gpu.py, None where one is not known."""

    index: str
    uuid: str
    node: str
    model: str
    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    xids: Sequence[XidSeen] = ()

    @property
    def name(self) -> str:
        """The words for it."""
        gpu = f"GPU {self.index or self.uuid}"
        return f"{gpu} of {self.node}" if self.node else gpu

    def get(self, signal: str) -> float:
        """A signal's value, 0 where it has none."""
        return self.values.get(signal) or 0.0


def board_of(key: GpuKey) -> str:
    """The `gpu` label of a GPU's columns: one for all MIG instances of a board."""
    return f"{key.hostname}/{key.index}" if key.index else key.uuid


class GpuHealth:
    """The GPUs of one target over time, by board."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._boards: dict[str, tuple[GpuKey, SignalSet]] = {}
        self._last: dict[str, int] = {}
        self._seen: dict[str, tuple[XidSeen, ...]] = {}

    def bind(self, gpus: Sequence[GpuFields]) -> None:
        """Take the GPUs that a layout has."""
        keys = {board_of(gpu.key): gpu.key for gpu in gpus}
        self._boards = {
            board: (key, SignalSet(health_signals(board), self._history))
            for board, key in keys.items()
        }

    def read(self, window: Window) -> tuple[GpuState, ...]:
        """Each GPU at the window's end."""
        return tuple(
            GpuState(
                key.index,
                key.uuid,
                key.hostname,
                key.model_name,
                signals.read(window).values,
                self._xids(board, window),
            )
            for board, (key, signals) in self._boards.items()
        )

    def _xids(self, board: str, window: Window) -> tuple[XidSeen, ...]:
        """What was seen of late, and what the gauge of the last one still shows."""
        now_s, before = window.now_s, self._last.get(board)
        last = window.newest(self._history.gauge_columns(XID, (("gpu", board),)))
        code = int(max(last)) if last else before
        seen = {one.code: one for one in self._seen.get(board, ())}
        if code is not None and code != before:
            if code == 0:
                seen.clear()  # the exporter, and with it the driver's state, began anew
            else:
                seen[code] = XidSeen(code, None if before is None else now_s)
            self._last[board] = code
        for counted in self._counted(board, window):
            known = seen.get(counted)
            if known is None or known.since_s is None:
                seen[counted] = XidSeen(counted, now_s)
        kept = tuple(
            one
            for one in seen.values()
            if one.code == code or (one.since_s is not None and now_s - one.since_s < XID_KEPT_S)
        )
        self._seen[board] = kept
        return kept

    def _counted(self, board: str, window: Window) -> set[int]:
        """XIDs of the window, where the exporter counts them by number."""
        found: set[int] = set()
        for column, at in self._history.counters.by_metric.get(XID_COUNTER, ()):
            labels = dict(column.labels)
            if labels.get("gpu") == board and (window.total_rate((at,)) or 0.0) > 0:
                found.add(_number(labels))
        for column, at in self._history.gauges.by_metric.get(XID_IN_WINDOW, ()):
            labels = dict(column.labels)
            if labels.get("gpu") == board and any(count > 0 for count in window.newest((at,))):
                found.add(_number(labels))
        return found - {0}


def _number(labels: Mapping[str, str]) -> int:
    xid = labels.get("xid", "")
    return int(xid) if xid.isdecimal() else 0
