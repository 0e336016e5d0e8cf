"""Where the history is kept when the settings do not say. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kneewatch.collector.base import StoreError

STORE_NAME = "kneewatch.db"
OURS_ALONE = 0o700


def store_path(stated: str | None, environ: Mapping[str, str]) -> Path:
    """The history's file: as stated, else in systemd's state folder, else in the user's; that
    folder is made where it is missing.

    Raises:
        StoreError: there is no such folder, and it cannot be made.
    """
    if stated:
        return Path(stated)
    folder = _folder(environ)
    try:
        folder.mkdir(mode=OURS_ALONE, parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"the folder for the history, {folder}, cannot be made: {exc.strerror or exc}; "
            "say with --store where the history is to be"
        ) from exc
    return folder / STORE_NAME


def _folder(environ: Mapping[str, str]) -> Path:
    # systemd names several folders with colons between; the first one is the unit's first.
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the standard says to ignore what is not
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as exc:
            raise StoreError(
                "there is no home folder for the history; say with --store where it is to be"
            ) from exc
    return base / "kneewatch"
