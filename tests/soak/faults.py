"""What goes wrong around a daemon, one thing after the other: what happens, and what is lost.

    python -m tests.soak.faults [NAME...]

Each fault has a daemon, servers and a history of its own, all real; only the clock that is set
belongs to the program, for nobody may set the machine's.
"""

from __future__ import annotations

import sys

from tests.soak.ill_clock import clock_set
from tests.soak.ill_disk import disk_full, flipped_before, flipped_running, read_only
from tests.soak.ill_targets import dripping, half_hang, half_open, hostile, huge

FAULTS = (
    disk_full,
    read_only,
    flipped_running,
    flipped_before,
    clock_set,
    half_hang,
    half_open,
    dripping,
    hostile,
    huge,
)


def main() -> None:
    """Try them, print what happened."""
    wanted = sys.argv[1:] or [fault.__name__ for fault in FAULTS]
    tried = [fault for fault in FAULTS if fault.__name__ in wanted]
    broken = 0
    for fault in tried:
        outcome = fault()
        print(outcome, flush=True)
        broken += not outcome.kept
    if broken or not tried:
        sys.exit(f"not as promised: {broken} of {len(tried)}")


if __name__ == "__main__":
    main()
