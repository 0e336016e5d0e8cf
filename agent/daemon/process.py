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
"""Objects more than before, until Python looks for cycles among them (its default: 700): what is
made of a page has none."""


OPEN_FILES = 65_536
"""Each target keeps a connection; the usual limit is 1,024."""


def tune_process() -> None:
    """Use little memory with many threads, little time to look for garbage, and as many
    connections as may be.

    glibc gives each thread that allocates an arena of its own, up to 8 for each core, and hardly
    ever gives their memory back.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with contextlib.suppress(OSError, AttributeError):  # another C library, such as musl
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MALLOC_ARENAS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


# --- What systemd wants to hear of a service: ready, alive, reloading, stopping. I/O edge ---------


USEC_PER_S = 1_000_000


class Systemd:
    """Tells the service manager, where there is one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket = environ.get("NOTIFY_SOCKET", "")
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "") if for_us else ""
        self.watchdog_s = int(usec) / USEC_PER_S if usec.isdecimal() else None
        """It kills what has not said for so long that it is alive; None: it does not."""

    def ready(self, status: str) -> None:
        """The service is up, or up again after a reload."""
        self._tell("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for people."""
        self._tell(f"STATUS={status}")

    def alive(self) -> None:
        """The watchdog, where there is one, may start counting anew."""
        if self.watchdog_s is not None:
            self._tell("WATCHDOG=1")

    def reloading(self) -> None:
        """The settings are being read again."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end has begun."""
        self._tell("STOPPING=1")

    def _tell(self, *lines: str) -> None:
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
