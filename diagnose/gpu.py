"""GPU signals and the health of each GPU over time, from pages of DCGM fields. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.names.dcgm_fields import (
    GpuFields,
    GpuKey,
    Gpus,
    GpuSlot,
    field_table,
)
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import EngineBinding, ValueSlot
from kneewatch.collector.page import Layout, Page
from kneewatch.collector.scrape_history import NAN, History
from kneewatch.collector.signals.signal import SignalSet
from kneewatch.collector.signals.table import DEV, GPU_SIGNALS, PROF, health_signals
from kneewatch.collector.window import Window
from kneewatch.diagnose.catalogue.gpu_specs import recognise
from kneewatch.diagnose.deployment.server_state import (
    CLOCK_SEEN,
    GPU_BUSY_FROM,
    GpuState,
    XidSeen,
    gpu_name,
)
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.rules.formatting import span
from kneewatch.rules.rule import LONG_WINDOWS, SCRAPES_IN_WINDOW

if TYPE_CHECKING:
    from kneewatch.collector.gpu.page import GpuNote, GpuPage

# --- Health of each GPU over time -----------------------------------------------------------------

XID = DEV + "XID_ERRORS"
XID_COUNTER = "DCGM_EXP_XID_ERRORS_TOTAL"
XID_IN_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"

CLOCK, POWER, ENERGY = DEV + "SM_CLOCK", DEV + "POWER_USAGE", DEV + "TOTAL_ENERGY_CONSUMPTION"
LOADS = (PROF + "GR_ENGINE_ACTIVE", DEV + "GPU_UTIL")

XID_KEPT_S = 600.0
"""Seconds for which an XID still counts after the gauge shows a newer XID."""


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
        self._clocks_hz: dict[str, float] = {}
        self._listed_watts: dict[str, float] = {}

    def bind(self, gpus: Sequence[GpuFields]) -> None:
        """Use the GPUs of a new page layout."""
        keys = {board_of(gpu.key): gpu.key for gpu in gpus}
        listed = {board: recognise(key.model_name) for board, key in keys.items()}
        self._listed_watts = {board: gpu.power_watts for board, gpu in listed.items() if gpu}
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
                self._values(board, signals, window),
                self._xids(board, window),
                self._is_awake(board, window),
            )
            for board, (key, signals) in self._boards.items()
        )

    def _values(self, board: str, signals: SignalSet, window: Window) -> Mapping[str, float | None]:
        values = signals.read(window)
        if (values.get("busy_ratio") or 0.0) >= GPU_BUSY_FROM:
            now_hz = values.get("gpu_sm_clock_hz") or 0.0
            self._clocks_hz[board] = max(now_hz, self._clocks_hz.get(board, 0.0))
        default_watts = values.get("gpu_power_limit_default_watts")
        usual_watts = default_watts or self._listed_watts.get(board)
        return {
            **values,
            CLOCK_SEEN: self._clocks_hz.get(board),
            "gpu_power_usual_watts": usual_watts,
        }

    def _xids(self, board: str, window: Window) -> tuple[XidSeen, ...]:
        """XIDs of the last XID_KEPT_S, and the XID that the last-XID gauge shows now."""
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
        """Whether the GPU is awake and has had load since the XID.

        False again when it is no longer awake.
        """
        if xid.since_s is not None and window.now_s <= xid.since_s:
            return False
        loaded = any(self._is_above_zero(board, field, window) for field in LOADS)
        return self._is_awake(board, window) and (xid.worked_since or loaded)

    def _is_awake(self, board: str, window: Window) -> bool:
        """Whether the newest page has the GPU's clock and power, and its energy counter has
        increased."""
        powered = all(self._is_above_zero(board, field, window) for field in (CLOCK, POWER))
        return powered and not self._is_frozen(board)

    def _is_above_zero(self, board: str, field: str, window: Window) -> bool:
        columns = self._history.columns.gauge_columns(field, (("gpu", board),))
        return any(value > 0 for value in window.newest(columns))

    def _is_frozen(self, board: str) -> bool:
        """Whether the energy counter did not change between the last two readings."""
        frames = self._history.frames
        columns = self._history.columns.counter_columns(ENERGY, (("gpu", board),))
        if len(frames) < 2 or not columns:
            return False
        return all(frames[-1].counters[at] == frames[-2].counters[at] for at in columns)

    def _counted(self, board: str, window: Window) -> set[int]:
        """XIDs counted in the window, from exporters that count them by number."""
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


# --- The GPUs of a target, from pages of DCGM fields ----------------------------------------------


STALE_AFTER_S = 90.0
"""Seconds after which a GPU page is stale; by default, dcgm-exporter collects every 30 s."""

FROZEN_AFTER_S = 300.0
"""If the energy counter does not change for this many seconds, the exporter counts as stuck.

A GPU always uses energy.
"""

OF_AN_INSTANCE = ("DCGM_FI_DEV_FB_", "DCGM_FI_PROF_")
"""Fields of a MIG instance itself. All other fields are its board's, repeated for each instance."""


VANISHED_READINGS = 2
"""A GPU counts as lost if this many readings in a row lack it but contain other GPUs."""

GONE_KEPT_S = 3600.0
"""Seconds for which a GPU is still reported after it left the page."""


class GpuAbsence(Struct):
    """A GPU that left the page: when it was last seen, and how many readings have lacked it
    since."""

    name: str
    seen_s: float
    readings: int = 0


class GpuChoice(Struct, frozen=True):
    """The GPUs of a page that belong to the target, how that is known, and which are missing.

    `names` are the known UUIDs or indexes of the target's GPUs; notes about other GPUs are ignored.
    If no name is known, all notes are kept.
    """

    gpus: Sequence[GpuFields]
    joined: str
    guess: bool = False
    names: frozenset[str] = frozenset()
    missing: Sequence[str] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Product names of the GPUs; empty if the match is a guess, and for MIG instances."""
        if self.guess or any(gpu.key.mig for gpu in self.gpus):
            return ()
        return tuple(sorted(gpu.key.model_name for gpu in self.gpus))


Choose = Callable[[Gpus], GpuChoice]


def whole_page(gpus: Gpus) -> GpuChoice:
    """A choice of all GPUs of the page."""
    count = len(gpus)
    if count == 1:
        return GpuChoice(gpus, "the page's only GPU")
    pods = {(work.namespace, work.pod) for gpu in gpus for work in gpu.workloads}
    if len(pods) == 1 and all(gpu.workloads for gpu in gpus):
        return GpuChoice(gpus, f"all {count} GPUs on the page: one pod uses them")
    why = f"assuming that all {count} GPUs on the page belong to this server"
    return GpuChoice(gpus, "all GPUs on the page: a guess", guess=True, missing=(why,))


class _Bound(Struct, frozen=True):
    """Values that are computed once per page layout."""

    layout: Layout
    choice: GpuChoice
    binding: EngineBinding
    slots: Sequence[GpuSlot]


class GpuMonitor:
    """Monitors the GPUs of one target over time."""

    def __init__(
        self, *, window_s: float, interval_s: float = 0.0, choose: Choose = whole_page
    ) -> None:
        self._window_s, self._choose = window_s, choose
        self._stale_after_s = max(STALE_AFTER_S, 3 * interval_s)
        self._history = History(keep_s=LONG_WINDOWS * window_s)
        self._signals = SignalSet(GPU_SIGNALS, self._history)
        self._health = GpuHealth(self._history)
        self._bound: _Bound | None = None
        self._energy: tuple[list[float], float] = ([], float("-inf"))
        self._newest = (NO_GPUS, float("-inf"))
        self._absences: dict[str, GpuAbsence] = {}

    def take(self, t_s: float, gpu_page: GpuPage) -> None:
        """Add a reading of the source."""
        bound = self._bound
        if bound is None or bound.layout is not gpu_page.page.layout:
            choice = self._choose(gpu_page.gpus)
            layout = gpu_page.page.layout
            bound = self._bound = _Bound(layout, choice, *engine_binding(choice.gpus))
            self._health.bind(choice.gpus)
        choice = bound.choice
        notes = list(_noted(choice, gpu_page.notes))
        lines = dict.fromkeys((*(note.text for note in notes), *choice.missing))
        unknown = [f"gpu_*: {line}" for line in lines]
        values: Mapping[str, float | None] = {}
        states: Sequence[GpuState] = ()
        if choice.gpus:
            values, states = self._read(t_s, gpu_page.page, bound)
            unknown += [
                f"{key}: {', '.join(fields)} is not {gpu_page.where}"
                for key, fields in self._signals.missing.items()
            ]
        vanished = self._vanished(t_s, choice, gpu_page.gpus)
        lost = tuple(dict.fromkeys((*(note.text for note in notes if note.lost), *vanished)))
        self._newest = (
            GpuReading(
                values, tuple(unknown), choice.joined, choice.guess, states, lost, choice.models
            ),
            t_s,
        )

    def failed(self, why: str, *, lost: bool = False) -> None:
        """Drop the last reading, because reading failed for the reason `why`.

        `lost`: the GPUs are gone.
        """
        reading = self._newest[0]
        unknown, gone = (f"gpu_*: {why}",), (why,) if lost else ()
        self._newest = (
            GpuReading({}, unknown, reading.joined, reading.guess, lost=gone),
            float("-inf"),
        )

    def reading(self, now_s: float) -> GpuReading:
        """The newest GPU signals, unless they are stale."""
        reading, taken_s = self._newest
        old_s = now_s - taken_s
        why = ""
        if reading.values and old_s > self._stale_after_s:
            why = f"the newest GPU page is {span(old_s)} old"
        elif reading.values and taken_s - self._energy[1] > FROZEN_AFTER_S:
            frozen_s = taken_s - self._energy[1]
            why = f"energy counter unchanged for {span(frozen_s)}: check the GPU exporter"
        if not why:
            return reading
        return GpuReading({}, (f"gpu_*: {why}",), reading.joined, reading.guess)

    def _read(
        self, t_s: float, page: Page, bound: _Bound
    ) -> tuple[Mapping[str, float | None], Sequence[GpuState]]:
        scaled = [NAN if (v := slot.value(page.values)) is None else v for slot in bound.slots]
        self._history.append(t_s, Page(bound.layout, scaled), bound.binding, None)
        self._watch_energy(t_s, scaled, bound.binding)
        times = self._history.times
        rare_s = SCRAPES_IN_WINDOW * (times[-1] - times[-2]) if len(times) > 1 else 0.0
        wanted_s = max(self._window_s, min(rare_s, LONG_WINDOWS * self._window_s))
        range_s = max(min(wanted_s, t_s - self._history.first_s), 1e-3)
        window = Window(self._history, now_s=t_s, range_s=range_s)
        return self._signals.read(window), self._health.read(window)

    def _vanished(self, t_s: float, choice: GpuChoice, page: Gpus) -> Iterator[str]:
        """A line for each of the target's GPUs that left the page while the page shows others."""
        present = {board_of(gpu.key) for gpu in page}
        own = {
            board_of(key): gpu_name(key.uuid, key.index, key.hostname)
            for key in (gpu.key for gpu in choice.gpus)
        }
        for board, name in own.items():
            self._absences[board] = GpuAbsence(name, t_s)
        for board, absence in list(self._absences.items()):
            if board in present and board not in own:
                del self._absences[board]  # on the page, and another target's now
            elif board not in present and t_s - absence.seen_s > GONE_KEPT_S:
                del self._absences[board]
            elif board not in present:
                absence.readings += 1
                if absence.readings >= VANISHED_READINGS:
                    yield f"{absence.name} is missing from the GPU page: drain the node"

    def _watch_energy(self, t_s: float, scaled: list[float], binding: EngineBinding) -> None:
        used = [scaled[slot.position] for slot in binding.counters.get(ENERGY, ())]
        energies = [value for value in used if value == value]
        if not energies or energies != self._energy[0] or t_s < self._energy[1]:
            self._energy = (energies, t_s)


def _noted(choice: GpuChoice, notes: Sequence[GpuNote]) -> Iterator[GpuNote]:
    """The source's notes on the target's GPUs, lost GPUs first."""
    for note in sorted(notes, key=lambda note: not note.lost):
        about = {name for name in (note.uuid, note.index) if name}
        if not choice.names or not about or about & choice.names:
            yield note


def engine_binding(gpus: Sequence[GpuFields]) -> tuple[EngineBinding, list[GpuSlot]]:
    """A binding with a column per GPU and field, and the page's slots in column order.

    A field of a whole board has one column, although the page repeats it for each MIG instance.
    """
    slots: list[GpuSlot] = []
    gauges: dict[str, tuple[ValueSlot, ...]] = {}
    counters: dict[str, tuple[ValueSlot, ...]] = {}
    fields = field_table().fields
    for gpu in gpus:
        key = gpu.key
        board = board_of(key)
        for name, places in gpu.fields.items():
            mig = key.mig if name.startswith(OF_AN_INSTANCE) else ""
            slots_by_name = counters if fields[name].kind == "counter" else gauges
            for place in places:
                labels = (("gpu", board), ("mig", mig), *place.labels)
                slots_by_name[name] = (
                    *slots_by_name.get(name, ()),
                    ValueSlot(len(slots), tuple(sorted(labels))),
                )
                slots.append(place)
    binding = EngineBinding(EngineKey("", "gpus"), gauges, counters, {}, {}, (), frozenset())
    return binding, slots
