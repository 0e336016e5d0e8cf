"""What to write instead of an unknown name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

SIMILAR_RATIO = 0.6
"""Similarity, by difflib, below which a name is not suggested."""

FEW = 12
"""Most valid names that a message lists."""


def did_you_mean(name: str, valid_names: Iterable[str], otherwise: str = "") -> str:
    """A question with the valid name that is most similar to `name`, ignoring case. In a section
    with a dot, such as `store.`, only its last part is compared.

    If no name is similar, a list of the valid names. If that list would be longer than FEW,
    `otherwise` (when given) is returned instead.
    """
    by_lower_case = {valid.lower(): valid for valid in valid_names}
    section = name.lower()[: name.rfind(".") + 1]
    siblings = {lower for lower in by_lower_case if lower.rpartition(".")[0] == section[:-1]}
    is_word = section[:-1].replace("_", "").isalpha()
    skip = len(section) if is_word and 0 < len(siblings) <= FEW else 0
    parts = {lower[skip:]: lower for lower in by_lower_case if not skip or lower in siblings}
    similar = get_close_matches(name.lower()[skip:], parts, n=1, cutoff=SIMILAR_RATIO)
    if similar:
        return f"did you mean {by_lower_case[parts[similar[0]]]}?"
    if skip:
        return f"valid: {', '.join(by_lower_case[lower] for lower in parts.values())}"
    if otherwise and len(by_lower_case) > FEW:
        return otherwise
    return f"valid: {', '.join(by_lower_case.values())}"
