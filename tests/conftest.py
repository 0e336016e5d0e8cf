"""How all tests run: property tests without deadlines, for machines are shared and noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
