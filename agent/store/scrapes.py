"""A target's scrapes over an hour or so as one blob: when, and why some failed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.agent.store.arrays import DamagedError, pack_times, unpack_times
from kneewatch.agent.store.chunk import Body, Pieces, Read, pack_body
from kneewatch.agent.store.model import StoredScrape


def pack_scrapes(scrapes: Sequence[StoredScrape]) -> bytes:
    """A chunk of scrapes, oldest first."""
    pieces = Pieces()
    directory = {
        "rows": len(scrapes),
        "times": pieces.lay(pack_times([scrape.t_s for scrape in scrapes])),
        "failed": [(at, scrape.error) for at, scrape in enumerate(scrapes) if not scrape.ok],
    }
    return pack_body(directory, pieces.laid)


def unpack_scrapes(read: Read) -> list[StoredScrape]:
    """The scrapes of a chunk.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read)
    try:
        failed = {int(at): str(error) for at, error in body.directory["failed"]}
        times = unpack_times(body.piece(body.directory["times"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the scrapes cannot be read: {error}") from error
    return [StoredScrape(t_s, at not in failed, failed.get(at, "")) for at, t_s in enumerate(times)]


def thinned(scrapes: Sequence[StoredScrape], *, step_s: float) -> list[StoredScrape]:
    """The scrapes that failed, and one a step of those that did not."""
    kept: list[StoredScrape] = []
    told: float | None = None
    for scrape in scrapes:
        if scrape.ok and scrape.t_s // step_s == told:
            continue
        if scrape.ok:
            told = scrape.t_s // step_s
        kept.append(scrape)
    return kept
