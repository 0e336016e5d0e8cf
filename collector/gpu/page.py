"""The output of all GPU sources: a page of DCGM fields, and notes on what is missing. I/O edge.

A DCGM exporter serves such a page. NVML's values are converted to one, so that all other code
handles a single set of names and units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.names.dcgm_fields import Gpus, resolve_gpus
from kneewatch.collector.page import Page
from kneewatch.collector.page_memory import PAGES

GPUS_LOST = "gpus_lost"
"""The CollectError's kind when GPUs were there before and none answers now: a fault, not a gap."""


class GpuNote(Struct, frozen=True):
    """A message about one GPU; about all GPUs if `uuid` and `index` are empty.

    `lost`: the GPU no longer answers, which is a fault.
    """

    text: str
    uuid: str = ""
    index: str = ""
    lost: bool = False


class GpuPage(Struct, frozen=True):
    """One reading: the page, which GPU each value belongs to, and notes on what is missing.

    `where` says where a field was looked for; it completes "is not ..." in messages.
    """

    page: Page
    gpus: Gpus
    notes: Sequence[GpuNote] = ()
    where: str = "on the GPU page"


class GpuCollector(Protocol):
    """A source of GPU pages. Not thread-safe. `name` is a short name of the source."""

    @property
    def name(self) -> str: ...

    def collect(self) -> GpuPage:
        """The GPUs' current values.

        Raises:
            CollectError: there is nothing to read. Its kind is `no_gpu` if that is not a fault.
        """
        ...

    def close(self) -> None:
        """Release resources; the next `collect` acquires them again."""
        ...


class DcgmCollector:
    """Reads one DCGM exporter's page, which has all GPUs of a node."""

    name = "dcgm"

    def __init__(self, url: str, settings: FetchSettings, limits: Limits) -> None:
        self._fetcher = Fetcher(url, settings)
        self._parser = PageParser(limits)

    @property
    def url(self) -> str:
        """The page's URL without credentials."""
        return self._fetcher.url

    def collect(self) -> GpuPage:
        """The current page, fetched by one GET.

        Raises:
            CollectError: there is no page, or it has no DCGM fields; the message contains the URL.
        """
        fetched = self._fetcher.get()
        try:
            with PAGES.in_turn(fetched.body):
                page = self._parser.parse(fetched.body, content_type=fetched.content_type)
                return GpuPage(page, resolve_gpus(page.layout))
        except CollectError as error:
            raise CollectError(f"{self.url}: {error}", kind=error.kind, hint=error.hint) from error

    def close(self) -> None:
        self._fetcher.close()
