"""One scrape of one page: its series in page order, with a value each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field


class Series(NamedTuple):
    """A sample's name and its labels, sorted by label name, so that equal series compare equal.

    A named tuple, because a page has hundreds.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def label(self, name: str, default: str = "") -> str:
        """The value of a label; `default` if the series lacks it."""
        for key, value in self.labels:
            if key == name:
                return value
        return default


class Layout(Struct, frozen=True, eq=False, weakref=True):
    """A page without its values. Compared by identity: the same object means the same layout.

    `series` has an entry per sample line, in page order, repeated ones included. `repeated` are the
    positions of series that appeared earlier on the page (the first one counts, as in Prometheus).
    `types` is the TYPE of each metric family that states one.
    """

    series: tuple[Series, ...]
    types: Mapping[str, str]
    repeated: frozenset[int] = frozenset()


class Page(Struct, frozen=True, eq=False):
    """One parsed page. Shape: `values` is (samples,), aligned with `layout.series`.

    `host` are the signals of the server's host that were recorded with the page.
    """

    layout: Layout
    values: list[float]
    timestamps_s: Mapping[int, float] = field(default_factory=dict[int, float])
    host: Mapping[str, float] = field(default_factory=dict[str, float])

    def samples(self) -> Iterator[tuple[Series, float]]:
        """Yields every series with its value in page order, without repeated ones."""
        for position, (series, value) in enumerate(
            zip(self.layout.series, self.values, strict=True)
        ):
            if position not in self.layout.repeated:
                yield series, value
