"""The process: memory and open files limits, and notifications to systemd. I/O edge."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import socket
import time
from collections.abc import Mapping

M_ARENA_MAX = -8
MALLOC_ARENAS = 2
COLLECT_AFTER = 20_000
"""New objects until Python's garbage collector runs (default: 700); parsed pages have no cycles."""


OPEN_FILES = 65_536
"""Each target keeps a connection; the usual limit is 1,024."""


def tune_process() -> None:
    """Limit malloc arenas, run the garbage collector rarely, and raise the limit on open files.

    glibc gives each allocating thread an arena of its own, up to 8 per core, and rarely returns
    their memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    with contextlib.suppress(OSError, AttributeError):  # another C library, such as musl
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MALLOC_ARENAS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


# --- Notifications to systemd ---------------------------------------------------------------------


USEC_PER_S = 1_000_000


class Systemd:
    """Notifies systemd; does nothing without it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket = environ.get("NOTIFY_SOCKET", "")
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "") if for_us else ""
        self.watchdog_s = int(usec) / USEC_PER_S if usec.isdecimal() else None
        """Watchdog timeout in seconds; None when systemd's watchdog is off."""

    def ready(self, status: str) -> None:
        """Report that the service is ready, at start and after a reload."""
        self._notify("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """Set the status line of `systemctl status`."""
        self._notify(f"STATUS={status}")

    def alive(self) -> None:
        """Reset the watchdog, if there is one."""
        if self.watchdog_s is not None:
            self._notify("WATCHDOG=1")

    def reloading(self) -> None:
        """Report that a reload has started."""
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the service is stopping."""
        self._notify("STOPPING=1")

    def _notify(self, *lines: str) -> None:
        if not self._socket:
            return
        # A leading @ stands for the zero byte of an abstract address.
        name = "\0" + self._socket[1:] if self._socket.startswith("@") else self._socket
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), name)
