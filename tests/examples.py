"""How many examples of a property are tried: all of them, or a tenth in `make quick`."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Settings for `count` examples, at most, of the profile that tests/conftest.py loaded."""
    return settings(max_examples=max(count * settings().max_examples // 100, 1))
