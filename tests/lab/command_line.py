"""A recommendation's changes applied to a command line's flags. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ChangeError(ValueError):
    """A change that this command line cannot take; the message names the flag."""


def edited(flags: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The flags with each change made: `flag`, `from` and `to` as in kneewatch's documents.

    Raises:
        ChangeError: it is no flag of the server, or the command line does not have what the
            change says it has.
    """
    edited_flags = list(flags)
    for change in changes:
        flag, before, after = change["flag"], change["from"], change["to"]
        if not flag.startswith("--"):
            raise ChangeError(f"{flag} is no flag of vllm serve")
        given = _given(edited_flags, flag)
        if given is not None and before is not None and not _same(given, before):
            raise ChangeError(f"{flag} is {given!r} on the command line, not {before!r}")
        if given is None and after is None:
            raise ChangeError(f"{flag} is to be dropped and not on the command line")
        edited_flags = _without(edited_flags, flag)
        if after is True:
            edited_flags = [*_without(edited_flags, opposite(flag)), flag]
        elif after is False:
            edited_flags = [*edited_flags, opposite(flag)]
        elif after is not None:
            edited_flags += [flag, str(after)]
    return edited_flags


def opposite(flag: str) -> str:
    """--no-x of --x, and --x of --no-x."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"


def _span(flags: Sequence[str], flag: str) -> tuple[int, int] | None:
    """Where the flag and its value are: from, and up to but without."""
    for at, word in enumerate(flags):
        if word.startswith(f"{flag}="):
            return at, at + 1
        if word == flag:
            valued = at + 1 < len(flags) and not flags[at + 1].startswith("--")
            return at, at + 2 if valued else at + 1
    return None


def _given(flags: Sequence[str], flag: str) -> str | bool | None:
    """The flag's value, True for one without, None where it is not given."""
    span = _span(flags, flag)
    if span is None:
        return None
    first, end = span
    return flags[first + 1] if end - first == 2 else flags[first].partition("=")[2] or True


def _without(flags: Sequence[str], flag: str) -> list[str]:
    span = _span(flags, flag)
    return list(flags) if span is None else [*flags[: span[0]], *flags[span[1] :]]


def _same(given: str | bool, stated: object) -> bool:
    if given == stated or given == str(stated):
        return True
    try:
        return float(given) == float(str(stated))
    except ValueError:
        return False
