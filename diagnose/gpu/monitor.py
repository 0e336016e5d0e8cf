"""GPU signals and health of a target's GPUs, from pages of DCGM fields over time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.collector.gpu.page import GpuNote, GpuPage
from kneewatch.collector.names.dcgm_fields import GpuBinding, GpuFields, GpuSlot, field_table
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import EngineBinding, Slot
from kneewatch.collector.samples import Layout, Page
from kneewatch.collector.scrape_history import NAN, History
from kneewatch.collector.signals.gpu import GPU_SIGNALS
from kneewatch.collector.signals.signal import Reading, SignalSet
from kneewatch.collector.window import Window
from kneewatch.diagnose.gpu.health import ENERGY, GpuHealth, GpuState, board_of, gpu_name
from kneewatch.rules.rule import LONG_WINDOWS

STALE_AFTER_S = 90.0
"""Seconds after which a GPU page is stale: dcgm-exporter collects every 30 s by default."""

FROZEN_AFTER_S = 300.0
"""Seconds without a change of the energy counter after which the exporter counts as stuck: a GPU
always uses energy."""

SCRAPES_IN_WINDOW = 2.2
"""Least length of the window in reading intervals, so that it always holds two readings."""

OF_AN_INSTANCE = ("DCGM_FI_DEV_FB_", "DCGM_FI_PROF_")
"""Fields of a MIG instance itself; all others are its board's, repeated."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """GPU signals now. `unknown` has a line for each that could not be read.

    `joined` describes how the GPUs were matched to the target; `guess`: they were assumed.
    `states` has the state of each GPU, `lost` a line for each that no longer answers. `models` are
    the product names of the target's GPUs, empty where whose they are is a guess, and for MIG
    instances.
    """

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    unknown: tuple[str, ...] = ("gpu_*: no GPU source",)
    joined: str = ""
    guess: bool = False
    states: Sequence[GpuState] = ()
    lost: Sequence[str] = ()
    models: tuple[str, ...] = ()


NO_GPUS = GpuReading()

VANISHED_READINGS = 2
"""Readings without a GPU, while others are read, after which it counts as lost."""

VANISHED_KEPT_S = 3600.0
"""Seconds for which a GPU that left the page is reported."""


@dataclass(slots=True)
class GpuAbsence:
    """A GPU that was on the page: when last, and how many readings have lacked it since."""

    name: str
    seen_s: float
    readings: int = 0


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

    @property
    def models(self) -> tuple[str, ...]:
        """The product names of the GPUs; empty where the match is a guess, and for MIG
        instances."""
        if self.guess or any(gpu.key.mig for gpu in self.gpus):
            return ()
        return tuple(sorted(gpu.key.model_name for gpu in self.gpus))


Choose = Callable[[GpuBinding], GpuChoice]


def whole_page(binding: GpuBinding) -> GpuChoice:
    """All GPUs of the page taken together."""
    count = len(binding.gpus)
    if count == 1:
        return GpuChoice(binding.gpus, "the page's only GPU")
    pods = {(work.namespace, work.pod) for gpu in binding.gpus for work in gpu.workloads}
    if len(pods) == 1 and all(gpu.workloads for gpu in binding.gpus):
        return GpuChoice(binding.gpus, f"all {count} GPUs on the page: one pod uses them")
    why = f"assuming that all {count} GPUs on the page belong to this server"
    return GpuChoice(binding.gpus, "all GPUs on the page: a guess", guess=True, missing=(why,))


@dataclass(frozen=True, slots=True)
class _Bound:
    """Computed once per page layout."""

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
        self._absences: dict[str, GpuAbsence] = {}

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
        vanished = self._vanished(t_s, choice, gpu_page.gpus)
        lost = tuple(dict.fromkeys((*(note.text for note in notes if note.lost), *vanished)))
        self._newest = (
            GpuReading(
                values, tuple(unknown), choice.joined, choice.guess, states, lost, choice.models
            ),
            t_s,
        )

    def failed(self, why: str, *, lost: bool = False) -> None:
        """Drop the last reading: reading failed for the reason `why`. `lost`: the GPUs are gone."""
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
            why = f"the newest GPU page is {old_s:.0f} s old"
        elif reading.values and taken_s - self._energy[1] > FROZEN_AFTER_S:
            frozen_s = taken_s - self._energy[1]
            why = f"energy counter unchanged for {frozen_s:.0f} s: check the GPU exporter"
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

    def _vanished(self, t_s: float, choice: GpuChoice, page: GpuBinding) -> Iterator[str]:
        """A line for each GPU of the target that has left a page which still shows others."""
        present = {board_of(gpu.key) for gpu in page.gpus}
        own = {board_of(gpu.key): gpu_name(gpu.key) for gpu in choice.gpus}
        for board, name in own.items():
            self._absences[board] = GpuAbsence(name, t_s)
        for board, absence in list(self._absences.items()):
            if board in present and board not in own:
                del self._absences[board]  # on the page, and another target's now
            elif board not in present and t_s - absence.seen_s > VANISHED_KEPT_S:
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
    """The GPUs' fields as columns of one binding, and the slots in the order of its positions.

    A board's own field is one column, although the page repeats it for each MIG instance.
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
