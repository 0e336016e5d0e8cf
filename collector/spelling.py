"""What to write instead of an unknown name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

SIMILAR_RATIO = 0.6
"""Similarity, by difflib, below which a name is not suggested."""

FEW = 12
"""Most valid names that a message lists."""


def did_you_mean(name: str, valid_names: Iterable[str], otherwise: str = "") -> str:
    """A question with the valid name that is most similar to `name`, ignoring case.

    If no name is similar, a list of the valid names. If that list would be longer than FEW,
    `otherwise` (when given) is returned instead.
    """
    by_lower_case = {valid.lower(): valid for valid in valid_names}
    similar = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=SIMILAR_RATIO)
    if similar:
        return f"did you mean {by_lower_case[similar[0]]}?"
    if otherwise and len(by_lower_case) > FEW:
        return otherwise
    return f"valid: {', '.join(by_lower_case.values())}"
