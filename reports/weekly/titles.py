"""Causes in a few words, as headings of incidents. Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes import BY_ID


def title(cause: str) -> str:
    """A cause in a few words."""
    return BY_ID[cause].title if cause in BY_ID else cause.replace("_", " ")
