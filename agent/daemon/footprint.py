"""What the process takes of the machine: memory, open files. I/O edge."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource

M_ARENA_MAX = -8
ARENAS = 2
COLLECT_AFTER = 20_000
"""Objects more than before, until Python looks for cycles among them (its default: 700): what is
made of a page has none."""


OPEN_FILES = 65_536
"""Each target keeps a connection; the usual limit is 1,024."""


def settle() -> None:
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
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
