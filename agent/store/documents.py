"""Diagnosis documents: when one is kept, how small, and as it was at any scrape. Pure.

A document is kept when it says something else, not when only its numbers move: those are in the
signals of every scrape, and are put back when the document is read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from typing import Any

import orjson

from kneewatch.agent.store.arrays import LEVEL, DamagedError
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.document import document, rounded
from kneewatch.rules.cascade import forecast_s
from kneewatch.rules.model import Severity
from kneewatch.rules.state import UNKNOWN

REFRESH_S = 60.0
"""While something is at warning or worse, its evidence is kept this often."""

REFRESH_QUIET_S = 600.0
"""The same while there is no more than a note."""

SHIFTED = 0.5
"""A document that takes more than this share of a whole one is kept whole."""


def structure(diagnosis: Diagnosis) -> Hashable:
    """What a diagnosis says, without its numbers."""
    stage = diagnosis.stage
    return (
        diagnosis.health,
        None if stage is None else (stage.number, stage.severity),
        tuple([(cause.id, cause.severity) for cause in diagnosis.causes]),
        tuple(diagnosis.symptoms),
        tuple([(finding.state, finding.missing) for finding in diagnosis.findings]),
        tuple([made.id for made in diagnosis.recommendations]),
        tuple(diagnosis.unknown),
        tuple(diagnosis.values),
        diagnosis.judged_against,
        diagnosis.tier,
    )


def refresh_s(diagnosis: Diagnosis, severity: Severity) -> float:
    """How old a document may become though it says the same."""
    if severity >= Severity.WARNING:
        return REFRESH_S
    return REFRESH_QUIET_S if diagnosis.causes else math.inf


def kept(diagnosis: Diagnosis) -> bytes:
    """The document as JSON, with its signals' names in place of their values."""
    made = document(diagnosis)
    made["signals"] = list(made["signals"])
    return orjson.dumps(made)


def squeeze(data: bytes, base: bytes | None) -> bytes:
    """A document, compressed; with a base, as what differs from that document."""
    packer = zlib.compressobj(LEVEL) if base is None else zlib.compressobj(LEVEL, zdict=base)
    return packer.compress(data) + packer.flush()


def expand(data: bytes, base: bytes | None) -> bytes:
    """The inverse of `squeeze`.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    unpacker = zlib.decompressobj() if base is None else zlib.decompressobj(zdict=base)
    try:
        return unpacker.decompress(data) + unpacker.flush()
    except zlib.error as error:
        raise DamagedError(f"a document cannot be read: {error}") from error


def at_scrape(
    stored: bytes, t_s: float, values: Mapping[str, float], *, exact: bool
) -> dict[str, Any]:
    """The document as it was at a scrape. `values`: the scrape's signals, NaN where unknown;
    `exact`: they are the scrape's own, not a minute's.

    Raises:
        DamagedError: the document is not JSON.
    """
    try:
        made: dict[str, Any] = orjson.loads(stored)
        signals = {key: _number(values.get(key)) for key in made["signals"]}
        made["t"], made["signals"] = round(t_s, 3), signals
        if exact:
            _renew(made, signals)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"a document cannot be read: {error}") from error
    return made


def _renew(made: dict[str, Any], signals: Mapping[str, float | None]) -> None:
    """The numbers that a document repeats from its signals."""
    for finding in made["findings"]:
        if finding["state"] != UNKNOWN:
            finding["value"] = rounded(signals.get(finding["signal"]))
    stage = made["stage"]
    if stage["number"] is not None and stage["number"] < 2:
        left_s = forecast_s(signals)
        stage["forecast_s"] = None if left_s is None else round(left_s, 1)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
