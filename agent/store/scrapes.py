"""A target's scrapes over an hour or so as one blob: when, and why some failed. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kneewatch.agent.store.arrays import PLAIN, Loops, decoding, pack_times
from kneewatch.agent.store.chunk import Body, Pieces, Read, pack_body
from kneewatch.agent.store.model import Scrapes


def pack_scrapes(scrapes: Scrapes) -> bytes:
    """A chunk of scrapes, oldest first."""
    pieces = Pieces()
    directory = {
        "rows": len(scrapes.times),
        "times": pieces.lay(pack_times(scrapes.times)),
        "failed": list(scrapes.failed.items()),
    }
    return pack_body(directory, pieces.laid)


def unpack_scrapes(read: Read, loops: Loops = PLAIN) -> Scrapes:
    """The scrapes of a chunk.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read, loops)
    with decoding("scrapes"):
        failed = {int(at): str(error) for at, error in body.directory["failed"]}
    return Scrapes(body.times(), failed)


def joined(parts: Iterable[Scrapes]) -> Scrapes:
    """Scrapes of several chunks, one behind the other."""
    times: array[float] = array("d")
    failed: dict[int, str] = {}
    for part in parts:
        failed |= {len(times) + at: why for at, why in part.failed.items()}
        times.extend(part.times)
    return Scrapes(times, failed)


def chosen(scrapes: Scrapes, places: Sequence[int]) -> Scrapes:
    """Some of the scrapes, by their places."""
    failed = {kept: scrapes.failed[at] for kept, at in enumerate(places) if at in scrapes.failed}
    return Scrapes(array("d", [scrapes.times[at] for at in places]), failed)


def thinned(scrapes: Scrapes, *, step_s: float) -> Scrapes:
    """The scrapes that failed, and one a step of those that did not."""
    kept: list[int] = []
    told: float | None = None
    for at, t_s in enumerate(scrapes.times):
        if at not in scrapes.failed:
            if t_s // step_s == told:
                continue
            told = t_s // step_s
        kept.append(at)
    return chosen(scrapes, kept)
