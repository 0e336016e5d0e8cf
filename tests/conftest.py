"""How all tests run: property tests without deadlines, for machines are shared and noisy, and
Ctrl-C means the same however the tests were started."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# A shell's background job ignores SIGINT, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
