"""GPU signals beside an engine's: pages of DCGM's fields over time, of the target's GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.collector.gpu.page import GpuNote, GpuPage
from kneewatch.collector.history import NAN, History
from kneewatch.collector.names.dcgm_fields import GpuBinding, GpuFields, GpuSlot, field_table
from kneewatch.collector.names.vllm_resolver import EngineBinding, Slot
from kneewatch.collector.names.vllm_series import EngineKey
from kneewatch.collector.samples import Layout, Page
from kneewatch.collector.signals.gpu import GPU_SIGNALS
from kneewatch.collector.signals.signal import Reading, SignalSet
from kneewatch.collector.window import Window
from kneewatch.diagnose.gpu.health import GpuHealth, GpuState, board_of
from kneewatch.rules.rule import LONG_WINDOWS

STALE_AFTER_S = 90.0
"""A GPU page older than this says nothing: dcgm-exporter collects every 30 s by default."""

FROZEN_AFTER_S = 300.0
"""A GPU uses energy whatever it does: a page whose energy stands still for so long is not read
anew, though it is served."""

SCRAPES_IN_WINDOW = 2.2
"""A window holds two readings at least, also where they are rarer than it is long."""

ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
OF_AN_INSTANCE = ("DCGM_FI_DEV_FB_", "DCGM_FI_PROF_")
"""Fields that a MIG instance has to itself; all others are its board's, repeated."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """GPU signals now. `unknown` has a line for each that could not be had.

    `joined` says how it is known that the GPUs are the target's, `guess` that it is not known.
    `states` has each GPU by itself, `lost` a line for each that no longer answers.
    """

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    unknown: tuple[str, ...] = ("gpu_*: no GPU source",)
    joined: str = ""
    guess: bool = False
    states: Sequence[GpuState] = ()
    lost: Sequence[str] = ()


NO_GPUS = GpuReading()


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """Which of a page's GPUs are the target's, how that is known, and what is missing of them.

    `names` are the GPUs by UUID or index as far as they are known: what is noted of others does
    not concern the target. Without names all of it does.
    """

    gpus: Sequence[GpuFields]
    joined: str
    guess: bool = False
    names: frozenset[str] = frozenset()
    missing: Sequence[str] = ()


Choose = Callable[[GpuBinding], GpuChoice]


def whole_page(binding: GpuBinding) -> GpuChoice:
    """All GPUs of the page taken together."""
    count = len(binding.gpus)
    if count == 1:
        return GpuChoice(binding.gpus, "the page's only GPU")
    why = f"all {count} GPUs of the page are taken for the target's, which is a guess"
    return GpuChoice(binding.gpus, "all GPUs of the page: a guess", guess=True, missing=(why,))


@dataclass(frozen=True, slots=True)
class _Bound:
    """What is worked out once a layout."""

    layout: Layout
    choice: GpuChoice
    binding: EngineBinding
    slots: Sequence[GpuSlot]


class GpuMonitor:
    """The GPUs of one target over time."""

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

    def take(self, t_s: float, gpu_page: GpuPage) -> None:
        """Take a reading of the source."""
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
            reading, states = self._read(t_s, gpu_page.page, bound)
            values = reading.values
            unknown += [
                f"{key}: {', '.join(fields)} is not {gpu_page.where}"
                for key, fields in reading.missing.items()
            ]
        lost = tuple(dict.fromkeys(note.text for note in notes if note.lost))
        self._newest = (
            GpuReading(values, tuple(unknown), choice.joined, choice.guess, states, lost),
            t_s,
        )

    def failed(self, why: str, *, lost: bool = False) -> None:
        """There is no reading: what was known no longer counts. `lost`: for the GPUs are gone."""
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
            why = f"no GPU page for {old_s:.0f} s"
        elif reading.values and taken_s - self._energy[1] > FROZEN_AFTER_S:
            frozen_s = taken_s - self._energy[1]
            why = f"the page shows the same energy for {frozen_s:.0f} s: is its exporter stuck?"
        if not why:
            return reading
        return GpuReading({}, (f"gpu_*: {why}",), reading.joined, reading.guess)

    def _read(self, t_s: float, page: Page, bound: _Bound) -> tuple[Reading, Sequence[GpuState]]:
        scaled = [NAN if (v := slot.value(page.values)) is None else v for slot in bound.slots]
        self._history.append(t_s, Page(bound.layout, scaled), bound.binding, None)
        self._watch_energy(t_s, scaled, bound.binding)
        times = self._history.times
        rare_s = SCRAPES_IN_WINDOW * (times[-1] - times[-2]) if len(times) > 1 else 0.0
        wanted_s = max(self._window_s, min(rare_s, LONG_WINDOWS * self._window_s))
        range_s = max(min(wanted_s, t_s - self._history.first_s), 1e-3)
        window = Window(self._history, now_s=t_s, range_s=range_s)
        return self._signals.read(window), self._health.read(window)

    def _watch_energy(self, t_s: float, scaled: list[float], binding: EngineBinding) -> None:
        used = [scaled[slot.position] for slot in binding.counters.get(ENERGY, ())]
        energies = [value for value in used if value == value]
        if not energies or energies != self._energy[0] or t_s < self._energy[1]:
            self._energy = (energies, t_s)


def _noted(choice: GpuChoice, notes: Sequence[GpuNote]) -> Iterator[GpuNote]:
    """What the source says of the target's GPUs; what is lost comes first."""
    for note in sorted(notes, key=lambda note: not note.lost):
        about = {name for name in (note.uuid, note.index) if name}
        if not choice.names or not about or about & choice.names:
            yield note


def engine_binding(gpus: Sequence[GpuFields]) -> tuple[EngineBinding, list[GpuSlot]]:
    """The GPUs' fields as columns of one binding, and the slots in the order of its positions.

    What belongs to a board is one column, however many of its MIG instances the page repeats it
    for.
    """
    slots: list[GpuSlot] = []
    gauges: dict[str, tuple[Slot, ...]] = {}
    counters: dict[str, tuple[Slot, ...]] = {}
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
                    Slot(len(slots), tuple(sorted(labels))),
                )
                slots.append(place)
    binding = EngineBinding(EngineKey("", "gpus"), gauges, counters, {}, {}, (), frozenset())
    return binding, slots
