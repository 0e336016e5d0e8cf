"""Limits the memory that all pages take together, before it is taken. Pure, thread-safe."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary, finalize

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.page import Layout

MIB = 1024 * 1024

SMALL_BYTES = 2 * MIB
"""Memory that a page may always take: the page of one vLLM engine takes 1 MiB."""

LARGE_BODY_BYTES = 128 * 1024
"""Pages with more bytes are parsed one at a time; those of vLLM have 50 to 100 kB an engine."""

LINE_BYTES, LABEL_BYTES = 1000, 200
TEXT_COPIES, WIDE_TEXT_COPIES = 5, 16
"""Most bytes that a line, a label and a byte of text take while a page is parsed. Text that is not
ASCII takes four bytes a character."""


def page_bytes(plain: bytes) -> int:
    """The most memory that a page takes while it is parsed, without parsing it."""
    copies = TEXT_COPIES if plain.isascii() else WIDE_TEXT_COPIES
    labels = plain.count(b'"') // 2
    return copies * len(plain) + LINE_BYTES * plain.count(b"\n") + LABEL_BYTES * labels


class PageMemory:
    """The memory of all pages: of bodies that are being read, of pages that are being parsed, and
    of layouts in use."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self._lock, self._parsing = Lock(), Lock()
        self._taken_bytes = 0
        self._layouts: WeakKeyDictionary[Layout, int] = WeakKeyDictionary()

    def take(self, size: int, *, before: int = 0) -> None:
        """Take memory for a page that has taken `before` already; `give_back` it afterwards.

        Raises:
            ExpositionError: of kind too_large, if that is not left.
        """
        with self._lock:
            is_small = before + size <= SMALL_BYTES
            if not is_small and self._total_bytes() + size > self.limit_bytes:
                raise ExpositionError(
                    f"no memory for a page that takes {(before + size) / MIB:.0f} MiB: all pages "
                    f"may take {self.limit_bytes / MIB:.0f} MiB together",
                    kind="too_large",
                )
            self._taken_bytes += size

    def _total_bytes(self) -> int:
        return self._taken_bytes + sum(list(self._layouts.values()))

    def give_back(self, size: int) -> None:
        with self._lock:
            self._taken_bytes -= size

    def give_back_after(self, owner: object, size: int) -> None:
        """Give back what was taken once `owner` is no longer used."""
        finalize(owner, self.give_back, size).atexit = False

    @contextmanager
    def parsing(self, plain: bytes) -> Generator[int]:
        """A context for parsing a page in full. Yields the most memory that the page takes.

        Raises:
            ExpositionError: as `take`.
        """
        size = page_bytes(plain)
        self.take(size)
        try:
            yield size
        finally:
            self.give_back(size)

    def keep(self, layout: Layout, size: int) -> None:
        """Count a layout for as long as it is used."""
        with self._lock:
            self._layouts.setdefault(layout, size)

    @contextmanager
    def in_turn(self, body: bytes) -> Generator[None]:
        """A context in which no other large page is parsed; small ones do not wait."""
        if len(body) <= LARGE_BODY_BYTES:
            yield
            return
        with self._parsing:
            yield


PAGES = PageMemory()
"""The memory of the pages of this process; without a limit in commands other than `run`."""
