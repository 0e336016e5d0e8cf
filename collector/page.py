"""One scrape of one page: its series in page order, each with a value. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field


class Series(NamedTuple):
    """A sample's name and labels. Labels are sorted by name, so that equal series compare equal.

    A named tuple, because a page has hundreds of them.
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

    - `series`: an entry per sample line, in page order, including repeated series.
    - `repeated`: positions of series that appeared earlier on the page. As in Prometheus, the first
      one is used.
    - `types`: the type of each metric family that has a TYPE line.
    """

    series: tuple[Series, ...]
    types: Mapping[str, str]
    repeated: frozenset[int] = frozenset()


class Page(Struct, frozen=True, eq=False):
    """One parsed page. Shape: `values` is (samples,), aligned with `layout.series`.

    `host` has the signals of the server's host, and `gpus` the page of its GPUs, if they were
    recorded with the page.
    """

    layout: Layout
    values: list[float]
    timestamps_s: Mapping[int, float] = field(default_factory=dict[int, float])
    host: Mapping[str, float] = field(default_factory=dict[str, float])
    gpus: Page | None = None

    def samples(self) -> Iterator[tuple[Series, float]]:
        """Yields every series with its value in page order; repeated series are left out."""
        for position, (series, value) in enumerate(
            zip(self.layout.series, self.values, strict=True)
        ):
            if position not in self.layout.repeated:
                yield series, value
