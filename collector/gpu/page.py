"""What every source of GPU numbers gives: a page of DCGM's fields, and what it could not see. Pure.

NVML's readings come as such a page too: everything behind it knows one set of names and units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kneewatch.collector.names.dcgm_fields import GpuBinding, resolve_gpus
from kneewatch.collector.samples import Layout, Page

GPUS_LOST = "gpus_lost"
"""The kind of a CollectError that is no gap but a fault: no GPU that was there answers."""


@dataclass(frozen=True, slots=True)
class GpuNote:
    """Something to say of a GPU, or of all where `uuid` and `index` are empty.

    `lost`: it no longer answers, which is a fault and not a gap.
    """

    text: str
    uuid: str = ""
    index: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GpuPage:
    """One reading: a page, whose values on it are whose GPU's, and what it does not show.

    `where` follows "is not" in what is said of a field that is missing.
    """

    page: Page
    gpus: GpuBinding
    notes: Sequence[GpuNote] = ()
    where: str = "on the GPU page"


class GpuCollector(Protocol):
    """A source of GPU pages, for one thread at a time. `name` is a short word for it."""

    @property
    def name(self) -> str: ...

    def collect(self) -> GpuPage:
        """The GPUs as they are now.

        Raises:
            CollectError: there is nothing to read; of kind no_gpu where that is no fault.
        """
        ...

    def close(self) -> None:
        """Give back what is held; the next `collect` takes it again."""
        ...


class GpuResolver:
    """Resolves the pages of one source: once a layout, not a page."""

    def __init__(self) -> None:
        self._last: tuple[Layout, GpuBinding] | None = None

    def resolve(self, layout: Layout) -> GpuBinding:
        """Where the values of each GPU stand on pages of this layout.

        Raises:
            CollectError: of kind not_metrics, where the page has no DCGM_FI_ series.
        """
        if self._last is None or self._last[0] is not layout:
            self._last = (layout, resolve_gpus(layout))
        return self._last[1]
