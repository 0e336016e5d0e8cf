"""The page of a DCGM exporter. I/O edge."""

from __future__ import annotations

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.collector.exposition.parser import PageParser
from kneewatch.collector.gpu.page import GpuPage, GpuResolver
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.collector.http.fetch import Fetcher


class DcgmCollector:
    """Collects one DCGM exporter's page, which describes all GPUs of a node."""

    name = "dcgm"

    def __init__(self, url: str, settings: FetchSettings, limits: Limits) -> None:
        self._fetcher = Fetcher(url, settings)
        self._parser = PageParser(limits)
        self._resolver = GpuResolver()

    @property
    def url(self) -> str:
        """The page's URL without credentials."""
        return self._fetcher.url

    def collect(self) -> GpuPage:
        """The page now, by one GET.

        Raises:
            CollectError: there is no page, or it holds no DCGM fields; the message has the URL.
        """
        fetched = self._fetcher.get()
        try:
            page = self._parser.parse(fetched.body, content_type=fetched.content_type)
            return GpuPage(page, self._resolver.resolve(page.layout))
        except CollectError as error:
            raise CollectError(f"{self.url}: {error}", kind=error.kind, hint=error.hint) from error

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()
