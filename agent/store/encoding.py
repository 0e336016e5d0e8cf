"""Encodes diagnosis documents and cycles. The result has about a tenth of their size. Pure."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Hashable, Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.store.chunks import LEVEL, DamagedError, to_bytes
from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.collector.scrape_history import Column, Restart
from kneewatch.diagnose.cause import Cause, told
from kneewatch.diagnose.change import Interval, conditions_of
from kneewatch.diagnose.latency_split import Changed, changed
from kneewatch.diagnose.recommend.advice import Advice, in_document
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import DocumentError, decode
from kneewatch.rules.cascade import EVICTS, forecast_s
from kneewatch.rules.formatting import clock
from kneewatch.rules.rule import UNKNOWN
from kneewatch.rules.wire import rounded, to_ms

DELTA_MAX_RATIO = 0.5
"""If the delta of a document is larger than this share of a whole document, the document is stored
whole."""

CHAIN_MAX_LINKS = 16
"""Maximum number of links that a reader follows to a document. Documents are stored as deltas to
the previous one; every 16th is a delta to a whole document."""


def fingerprint(diagnosis: Verdict) -> Hashable:
    """The content of a diagnosis, without the numbers that can be restored from the signals of a
    scrape.

    Diagnoses with equal fingerprints share one stored document.
    """
    stage = diagnosis.stage
    return (
        diagnosis.health,
        (stage.number, stage.severity, stage.since_s, stage.reasons),
        tuple([_concluded(cause, diagnosis.t_s) for cause in diagnosis.causes]),
        tuple(diagnosis.symptoms),
        tuple(
            [
                (
                    finding.rule,
                    finding.state,
                    finding.since_s,
                    finding.missing,
                    finding.note,
                    finding.clearing_since_s,
                    finding.was,
                    finding.held,
                )
                for finding in diagnosis.findings
                if finding.state != "ok" or finding.note  # the others have no more to tell
            ]
        ),
        tuple([_recommended(advice) for advice in diagnosis.recommendations]),
        tuple(diagnosis.unknown),
        tuple(diagnosis.values),
        diagnosis.judged_against,
        diagnosis.tier,
    )


def _concluded(cause: Cause, t_s: float) -> Cause:
    """The cause as it enters the fingerprint. Its `seen_s` is removed if that is the time of this
    scrape."""
    return replace(cause, seen_s=math.inf) if cause.seen_s == t_s else cause


def _recommended(advice: Advice) -> Hashable:
    """The recommendation as it enters the fingerprint. Its numbers are included, because the hash
    of a recommendation ignores them."""
    return advice, tuple(advice.before.items()), tuple(advice.predicted.items())


def encode_document(verdict: Verdict) -> bytes:
    """A verdict as a JSON document with the names of its signals but not their values, which are 0.

    Facts about the server are left out, because their ages change with every scrape.
    """
    findings = [
        finding if finding.state == UNKNOWN else replace(finding, value=None)
        for finding in verdict.findings
    ]
    return msgspec.json.encode(
        replace(
            verdict,
            server=None,
            changed=_only_restart(verdict.changed),
            causes=[told(cause) for cause in verdict.causes],
            findings=findings,
            values=dict.fromkeys(verdict.values, 0),
        )
    )


def _shown(advice: Advice) -> Advice:
    """The recommendation, without the zeros that earlier versions stored for measured numbers."""
    if advice.as_of_s is not None:
        return advice
    return replace(advice, before={key: value for key, value in advice.before.items() if value})


def compress_document(data: bytes, base: bytes | None) -> bytes:
    """Compress a document. With `base`, the result is a delta to that document."""
    packer = zlib.compressobj(LEVEL) if base is None else zlib.compressobj(LEVEL, zdict=base)
    return packer.compress(data) + packer.flush()


def decompress_document(data: bytes, base: bytes | None) -> bytes:
    """The inverse of `compress_document`.

    Raises:
        DamagedError: the bytes cannot be decompressed.
    """
    unpacker = zlib.decompressobj() if base is None else zlib.decompressobj(zdict=base)
    try:
        return unpacker.decompress(data) + unpacker.flush()
    except zlib.error as error:
        raise DamagedError(f"a document cannot be read: {error}") from error


def verdict_at_scrape(
    stored: bytes, t_s: float, values: Mapping[str, float], *, averaged: bool, exact: bool
) -> Verdict:
    """The verdict at a scrape: the stored document, with the numbers restored from the signals of
    that scrape.

    `values` are the signals of the scrape, NaN where unknown. `averaged`: they are means over a
    minute, because they were downsampled. `exact`: the stored document is valid for every scrape
    until the next document; otherwise only for its own scrape.

    Raises:
        DamagedError: the document is not valid.
    """
    verdict, now_s = _stored_verdict(stored), to_ms(t_s)
    signals = {key: _number(values.get(key)) for key in verdict.values}
    stage, causes, unknown = verdict.stage, verdict.causes, list(verdict.unknown)
    if stage.number is not None and stage.number < EVICTS:
        left_s = forecast_s(signals)
        stage = replace(stage, forecast_s=None if left_s is None else round(left_s, 1))
    if exact and not averaged:
        causes = [
            replace(cause, seen_s=now_s) if cause.seen_s == verdict.t_s else cause
            for cause in causes
        ]
    elif causes and verdict.t_s != now_s:
        unknown.insert(0, f"causes: causes and evidence are as of {clock(verdict.t_s)}")
    if averaged:
        unknown.insert(0, "signals: downsampled to one-minute means at this age")
    return replace(
        verdict,
        t_s=now_s,
        stage=stage,
        causes=causes,
        changed=changed(
            signals, now_s, None if verdict.changed is None else verdict.changed.restart
        ),
        findings=[
            finding
            if finding.state == UNKNOWN
            else replace(finding, value=rounded(signals.get(finding.signal)))
            for finding in verdict.findings
        ],
        recommendations=[_shown(advice) for advice in verdict.recommendations],
        values=signals,
        unknown=unknown,
    )


def _stored_verdict(stored: bytes) -> Verdict:
    try:
        return decode(stored)
    except DocumentError as error:
        earlier = _of_version_0_1(stored)
        if earlier is None:
            raise DamagedError(f"a document cannot be read: {error}") from error
        return earlier


def _of_version_0_1(stored: bytes) -> Verdict | None:
    """A document as version 0.1 stored it: with a list of the signals' names, and with null for
    numbers of recommendations that are measured. None if it is no such document."""
    try:
        document = msgspec.json.decode(stored)
        document["signals"] = dict.fromkeys(document["signals"])
        for advice in document["recommendations"]:
            advice["before"] = {key: value or 0.0 for key, value in advice["before"].items()}
        return decode(msgspec.json.encode(document))
    except (msgspec.DecodeError, DocumentError, KeyError, TypeError, AttributeError):
        return None


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- Cycles ---------------------------------------------------------------------------------------


ERROR_LENGTH = 500
ENGINES_REMEMBERED = 20_000
"""Maximum number of engines whose last document is remembered. When it is exceeded, all are
forgotten, because replicas come and go."""


class EngineName(Struct, frozen=True):
    """The identity of an engine."""

    target: str
    model: str
    engine: str
    replica: str


class PackedEngine(Struct, frozen=True):
    """The encoded state of one engine after a scrape.

    `signals` are float32 in the order of `keys`. `counters` are float64 in the order of `columns`.
    `read`: the page could be read. `document` is None if the previous document is still valid.
    `recommendations` are JSON documents by name.
    """

    name: EngineName
    t_s: float
    keys: tuple[str, ...]
    signals: bytes
    columns: tuple[Column, ...]
    counters: bytes
    conditions: tuple[Interval, ...]
    read: bool
    document: bytes | None
    recommendations: Mapping[str, bytes]
    config: Mapping[str, str]
    started_s: float | None
    restart: Restart | None


class PackedCycle(Struct, frozen=True):
    """The encoded state of one target after a scrape. `bytes` is its approximate size in memory."""

    t_s: float
    target: str
    labels: Mapping[str, str]
    error: str | None
    engines: tuple[PackedEngine, ...]
    bytes: int


class _Last(Struct):
    """For one engine: the hash of its last document, and its last recommendations, both as objects
    and encoded."""

    fingerprint: int | None = None
    recommendations: Sequence[Advice] = ()
    packed: Mapping[str, bytes] = {}


class Packer:
    """Encodes cycles. A document that equals the engine's last one is left out."""

    def __init__(self) -> None:
        self._last: dict[EngineName, _Last] = {}
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}

    def forget(self, name: EngineName | None = None) -> None:
        """Encode the next document of an engine, or of all engines, even if it is unchanged. Needed
        if the last document was not written."""
        if name is None:
            self._last.clear()
        else:
            self._last.pop(name, None)

    def pack(self, cycle: Cycle) -> PackedCycle:
        """Encode a cycle."""
        engines = tuple([self._engine(cycle.target, engine) for engine in cycle.engines])
        size = 500 + sum(
            1000 + len(packed.signals) + len(packed.counters) + len(packed.document or b"")
            for packed in engines
        )
        error = None if cycle.error is None else cycle.error[:ERROR_LENGTH]
        return PackedCycle(cycle.t_s, cycle.target, cycle.labels, error, engines, size)

    def _engine(self, target: str, cycle: EngineCycle) -> PackedEngine:
        diagnosis = cycle.diagnosis
        if len(self._last) > ENGINES_REMEMBERED:
            self._last.clear()
        name = EngineName(target, diagnosis.model, diagnosis.engine, cycle.replica)
        last = self._last.setdefault(name, _Last())
        keys = tuple(diagnosis.values)
        values = [math.nan if value is None else value for value in diagnosis.values.values()]
        return PackedEngine(
            name,
            diagnosis.t_s,
            self._keys.setdefault(keys, keys),
            to_bytes(array("f", values)),
            cycle.columns,
            to_bytes(array("d", cycle.counters)),
            conditions_of(diagnosis),
            diagnosis.was_read,
            _document(last, diagnosis),
            _recommendations(last, diagnosis),
            cycle.config,
            cycle.started_s,
            cycle.restart,
        )


def _document(last: _Last, diagnosis: Verdict) -> bytes | None:
    current = hash(fingerprint(diagnosis))
    if last.fingerprint == current:
        return None
    last.fingerprint = current
    return encode_document(diagnosis)


def _only_restart(what: Changed | None) -> Changed | None:
    """What changed, without the numbers, which the signals have."""
    return None if what is None or what.restart is None else Changed(restart=what.restart)


def _recommendations(last: _Last, diagnosis: Verdict) -> Mapping[str, bytes]:
    # Unchanged recommendations stay the same object, which `Tracking` relies on.
    if last.recommendations is not diagnosis.recommendations:
        last.recommendations = diagnosis.recommendations
        last.packed = dict(map(_packed, diagnosis.recommendations))
    return last.packed


def _packed(advice: Advice) -> tuple[str, bytes]:
    changes = msgspec.json.encode(advice.changes).decode()
    document = msgspec.json.encode(in_document(advice))
    return f"{advice.id} {advice.cause} {changes}", document
