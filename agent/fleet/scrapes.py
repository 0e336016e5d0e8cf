"""Which series come from scrapes that fail. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kneewatch.diagnose.fleet.shape import Labels


class Failing:
    """The scrapes that fail, by the labels of `up`; series of a page are in it or not.

    A job and an address may be there once in each cluster: all labels that both have must agree.
    `up` has none of the page's own.
    """

    def __init__(self, ups: Iterable[Labels]) -> None:
        self._ups: dict[tuple[str, str], list[Labels]] = {}
        for labels in ups:
            self._ups.setdefault(_scrape(labels), []).append(labels)

    def __contains__(self, labels: Labels) -> bool:
        """Whether the scrape of such a series fails."""
        return any(_agree(up, labels) for up in self._ups.get(_scrape(labels), ()))


def _scrape(labels: Labels) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _agree(up: Labels, labels: Labels) -> bool:
    return all(labels.get(name, value) == value for name, value in up.items() if name != "__name__")
