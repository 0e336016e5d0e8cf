"""Health signals of each GPU over time, and the meaning of NVIDIA's XID errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kneewatch.collector.names.dcgm_fields import GpuFields, GpuKey
from kneewatch.collector.scrape_history import History
from kneewatch.collector.signals.gpu import DEV, PROF, health_signals
from kneewatch.collector.signals.signal import SignalSet
from kneewatch.collector.window import Window

RESET = "reset the GPU"
REBOOT = "reboot the node"
RESTART = "restart the server; the GPU can wait for its next reset"
DRAINED = "reset the GPU once it is drained"
REPLACE = "reset the GPU; replace it if the error returns"
LINK = "reset all GPUs of that NVLink fabric; check cables, bridges and NVSwitches if it returns"


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID error number, what it means and what to do about it.

    `urgent`: until the action is taken, work on that GPU is lost or its results are wrong. `halts`:
    the GPU does nothing at all until then. If it works, the action has been taken and the number is
    old.
    """

    code: int
    meaning: str
    action: str
    urgent: bool = True
    halts: bool = False


TABLE = (
    Xid(46, "the GPU stopped processing", RESET, halts=True),
    Xid(48, "an uncorrectable (double bit) memory error", RESET),
    Xid(61, "the GPU's microcontroller hit a breakpoint", RESET),
    Xid(62, "the GPU's microcontroller halted", RESET, halts=True),
    Xid(63, "a memory row was marked to be remapped", DRAINED, False),
    Xid(64, "a memory row could not be remapped", REPLACE),
    Xid(74, "an NVLink error", LINK),
    Xid(79, "the GPU has fallen off the bus", REBOOT, halts=True),
    Xid(92, "many single bit memory errors", DRAINED, False),
    Xid(94, "an uncorrectable memory error, contained to one program", RESTART),
    Xid(95, "an uncorrectable memory error, not contained", RESET),
    Xid(109, "the GPU did not switch contexts in time", RESET),
    Xid(110, "a security fault", RESET),
    Xid(119, "the GPU's system processor (GSP) did not answer", RESET, halts=True),
    Xid(120, "an error of the GPU's system processor (GSP)", RESET),
    Xid(140, "a memory error that could not be recovered", RESET),
    Xid(143, "the GPU could not be initialised", RESET, halts=True),
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
"""XIDs that concern the GPU itself rather than a program, by number."""

RECOVERY: Mapping[int, str] = MappingProxyType(
    {
        1: RESET,
        2: REBOOT,
        3: "drain peer-to-peer work",
        4: "drain the GPU, then reset it",
    }
)
"""The recovery action that the driver requests (nvmlDeviceGpuRecoveryAction_t of nvml.h); 0:
none."""


# --- Health of each GPU over time -----------------------------------------------------------------

XID = DEV + "XID_ERRORS"
XID_COUNTER = "DCGM_EXP_XID_ERRORS_TOTAL"
XID_IN_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"

CLOCK, POWER, ENERGY = DEV + "SM_CLOCK", DEV + "POWER_USAGE", DEV + "TOTAL_ENERGY_CONSUMPTION"
LOADS = (PROF + "GR_ENGINE_ACTIVE", DEV + "GPU_UTIL")

XID_KEPT_S = 600.0
"""How long an XID counts after another has replaced it as the last one."""


@dataclass(frozen=True, slots=True)
class XidSeen:
    """An XID that a GPU reported. `since_s` is None where the first scrape already had it.
    `worked_since`: the GPU has done work since."""

    code: int
    since_s: float | None
    worked_since: bool = False


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU now: the signals of collector/signals/gpu.py, None where one is unknown. `is_awake`:
    it reports clock and power, and uses energy."""

    index: str
    uuid: str
    node: str
    model: str
    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    xids: Sequence[XidSeen] = ()
    is_awake: bool = False

    @property
    def name(self) -> str:
        """The GPU's name in messages: `GPU 3 of node-7`."""
        return gpu_name(GpuKey(self.uuid, self.index, self.model, self.node, ""))

    def get(self, signal: str) -> float:
        """A signal's value, 0 where it has none."""
        return self.values.get(signal) or 0.0


def gpu_name(key: GpuKey) -> str:
    """A GPU's name in messages: `GPU 3 of node-7`."""
    gpu = f"GPU {key.index or key.uuid}"
    return f"{gpu} of {key.hostname}" if key.hostname else gpu


def board_of(key: GpuKey) -> str:
    """The `gpu` label of a GPU's columns, shared by all MIG instances of a board."""
    return f"{key.hostname}/{key.index}" if key.index else key.uuid


class GpuHealth:
    """The GPUs of one target over time, by board."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._boards: dict[str, tuple[GpuKey, SignalSet]] = {}
        self._last: dict[str, int] = {}
        self._seen: dict[str, tuple[XidSeen, ...]] = {}

    def bind(self, gpus: Sequence[GpuFields]) -> None:
        """Use the GPUs of a new page layout."""
        keys = {board_of(gpu.key): gpu.key for gpu in gpus}
        self._boards = {
            board: (key, SignalSet(health_signals(board), self._history))
            for board, key in keys.items()
        }

    def read(self, window: Window) -> tuple[GpuState, ...]:
        """The state of each GPU at the window's end."""
        return tuple(
            GpuState(
                key.index,
                key.uuid,
                key.hostname,
                key.model_name,
                signals.read(window).values,
                self._xids(board, window),
                self._is_awake(board, window),
            )
            for board, (key, signals) in self._boards.items()
        )

    def _xids(self, board: str, window: Window) -> tuple[XidSeen, ...]:
        """XIDs of the last XID_KEPT_S, and the one that the last-XID gauge still shows."""
        now_s, before = window.now_s, self._last.get(board)
        last = window.newest(self._history.columns.gauge_columns(XID, (("gpu", board),)))
        code = int(max(last)) if last else before
        seen = {xid.code: xid for xid in self._seen.get(board, ())}
        if code is not None and code != before:
            if code == 0:
                seen.clear()  # the exporter restarted, and with it the driver's state
            else:
                seen[code] = XidSeen(code, None if before is None else now_s)
            self._last[board] = code
        for counted in self._counted(board, window):
            earlier = seen.get(counted)
            if earlier is None or earlier.since_s is None:
                seen[counted] = XidSeen(counted, now_s)
        kept = tuple(
            replace(xid, worked_since=self._worked_since(board, xid, window))
            for xid in seen.values()
            if xid.code == code or (xid.since_s is not None and now_s - xid.since_s < XID_KEPT_S)
        )
        self._seen[board] = kept
        return kept

    def _worked_since(self, board: str, xid: XidSeen, window: Window) -> bool:
        """Whether the GPU is awake and has had load since the XID; false again once it is not."""
        if xid.since_s is not None and window.now_s <= xid.since_s:
            return False
        loaded = any(self._is_above_zero(board, field, window) for field in LOADS)
        return self._is_awake(board, window) and (xid.worked_since or loaded)

    def _is_awake(self, board: str, window: Window) -> bool:
        """Whether the newest page has the GPU's clock and power, and its energy counter moved."""
        powered = all(self._is_above_zero(board, field, window) for field in (CLOCK, POWER))
        return powered and not self._is_frozen(board)

    def _is_above_zero(self, board: str, field: str, window: Window) -> bool:
        columns = self._history.columns.gauge_columns(field, (("gpu", board),))
        return any(value > 0 for value in window.newest(columns))

    def _is_frozen(self, board: str) -> bool:
        """Whether the energy counter stood still between the last two readings."""
        frames = self._history.frames
        columns = self._history.columns.counter_columns(ENERGY, (("gpu", board),))
        if len(frames) < 2 or not columns:
            return False
        return all(frames[-1].counters[at] == frames[-2].counters[at] for at in columns)

    def _counted(self, board: str, window: Window) -> set[int]:
        """XIDs of the window, from exporters that count them by number."""
        codes: set[int] = set()
        for column, at in self._history.counters.by_metric.get(XID_COUNTER, ()):
            labels = dict(column.labels)
            if labels.get("gpu") == board and (window.total_rate((at,)) or 0.0) > 0:
                codes.add(_number(labels))
        for column, at in self._history.gauges.by_metric.get(XID_IN_WINDOW, ()):
            labels = dict(column.labels)
            if labels.get("gpu") == board and any(count > 0 for count in window.newest((at,))):
                codes.add(_number(labels))
        return codes - {0}


def _number(labels: Mapping[str, str]) -> int:
    xid = labels.get("xid", "")
    return int(xid) if xid.isdecimal() else 0
