"""The common output of all GPU sources: a page of DCGM fields, and notes on what is missing. Pure.

NVML's values are converted to such a page too, so all other code uses one set of names and units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kneewatch.collector.names.dcgm_fields import GpuBinding, resolve_gpus
from kneewatch.collector.samples import Layout, Page

GPUS_LOST = "gpus_lost"
"""Kind of the CollectError when no GPU that was there answers: a fault, not a gap."""


@dataclass(frozen=True, slots=True)
class GpuNote:
    """A message about a GPU, or about all where `uuid` and `index` are empty.

    `lost`: the GPU no longer answers, which is a fault.
    """

    text: str
    uuid: str = ""
    index: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GpuPage:
    """One reading: the page, which GPU each value belongs to, and what is missing.

    `where` completes "is not ..." in messages about a missing field.
    """

    page: Page
    gpus: GpuBinding
    notes: Sequence[GpuNote] = ()
    where: str = "on the GPU page"


class GpuCollector(Protocol):
    """A source of GPU pages. Not thread-safe. `name` is a short word for it."""

    @property
    def name(self) -> str: ...

    def collect(self) -> GpuPage:
        """The GPUs' current values.

        Raises:
            CollectError: there is nothing to read; of kind no_gpu where that is no fault.
        """
        ...

    def close(self) -> None:
        """Release resources; the next `collect` acquires them again."""
        ...


class GpuResolver:
    """Resolves the pages of one source, once per layout."""

    def __init__(self) -> None:
        self._last: tuple[Layout, GpuBinding] | None = None

    def resolve(self, layout: Layout) -> GpuBinding:
        """The positions of each GPU's values on pages of this layout.

        Raises:
            CollectError: of kind not_metrics, where the page has no DCGM_FI_ series.
        """
        if self._last is None or self._last[0] is not layout:
            self._last = (layout, resolve_gpus(layout))
        return self._last[1]
