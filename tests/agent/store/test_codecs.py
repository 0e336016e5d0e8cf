"""Columns, times, counters, scrapes and documents come out as they went in, or are refused."""

from __future__ import annotations

import math
import struct
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.report.history import NUMPY
from kneewatch.agent.store.chunks import (
    PURE_PYTHON,
    ChunkBody,
    CounterChunk,
    DamagedError,
    Decoders,
    PieceWriter,
    SignalChunk,
    bytes_reader,
    column_of,
    concat_scrapes,
    downsample_scrapes,
    floats_from_bytes,
    pack_body,
    pack_column,
    pack_counters,
    pack_integers,
    pack_scrapes,
    pack_signals,
    pack_times,
    to_bytes,
    unpack_column,
    unpack_integers,
    unpack_scrapes,
    unpack_times,
    value_in_column,
)
from kneewatch.agent.store.encoding import (
    compress_document,
    decompress_document,
    encode_document,
)
from kneewatch.agent.store.records import Scrapes
from kneewatch.agent.store.stored_series import scrapes_from_rows
from kneewatch.collector.scrape_history import Column
from tests.agent.store.factories import diagnosis

ANY = st.floats(allow_nan=True, allow_infinity=True)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
COUNTS = st.integers(0, 1 << 53).map(float)
LARGEST_FLOAT32 = 3.4028234663852886e38


def bits(values: array[float] | list[float]) -> list[bytes]:
    """Bit patterns, for NaN is not equal to itself; all NaN are one."""
    return [b"nan" if v != v else struct.pack("<d", v) for v in values]


WITH_BOTH = pytest.mark.parametrize("loops", [PURE_PYTHON, NUMPY], ids=["plain", "numpy"])
"""A daemon reads with the ones, a report with the others."""


@WITH_BOTH
@given(values=st.lists(INT64))
def test_integers_come_back(loops: Decoders, values: list[int]) -> None:
    assert list(unpack_integers(pack_integers(values), loops)) == values


@WITH_BOTH
@given(times=st.lists(ANY))
def test_times_come_back_to_the_last_bit(loops: Decoders, times: list[float]) -> None:
    assert bits(unpack_times(pack_times(times), loops)) == bits(times)


@WITH_BOTH
@given(column=st.lists(ANY))
def test_a_column_keeps_seven_digits(loops: Decoders, column: list[float]) -> None:
    unpacked = unpack_column(pack_column(column), loops)
    assert bits(unpacked) == bits(array("d", array("f", column)))
    for number, value in zip(unpacked, column, strict=True):
        if math.isfinite(value) and abs(value) <= LARGEST_FLOAT32:
            assert abs(number - value) <= 6e-8 * abs(value) + 1e-44


@given(st.lists(ANY))
def test_bytes_of_arrays_come_back(values: list[float]) -> None:
    assert bits(floats_from_bytes("d", to_bytes(array("d", values)))) == bits(values)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[float], dict[str, list[float]]]:
    rows = draw(st.integers(1, 12))
    column = st.lists(ANY, min_size=rows, max_size=rows)
    steady = ANY.map(lambda value: [value] * rows)
    names = st.text(min_size=1, max_size=8)
    columns = draw(st.dictionaries(names, st.one_of(column, steady), max_size=6))
    return draw(st.lists(st.floats(0, 2e9), min_size=rows, max_size=rows)), columns


@WITH_BOTH
@given(table=tables())
def test_a_chunk_of_signals_comes_back_column_by_column(
    loops: Decoders, table: tuple[list[float], dict[str, list[float]]]
) -> None:
    times, columns = table
    chunk = SignalChunk(bytes_reader(pack_signals(times, columns)), loops)
    assert chunk.keys == list(columns)
    assert list(chunk.times()) == times
    for key, column in columns.items():
        unpacked = chunk.column(key)
        flat = all(v == column[0] or (v != v and column[0] != column[0]) for v in column)
        exact = flat and not math.isinf(column[0])
        wanted = column if exact else array("d", array("f", column))
        assert [v if v else 0.0 for v in bits(unpacked)] == [v if v else 0.0 for v in bits(wanted)]
    assert all(map(math.isnan, chunk.column("no such signal\n")))


@WITH_BOTH
@given(table=tables(), whole=st.lists(st.lists(COUNTS, min_size=3, max_size=3), max_size=4))
def test_counters_come_back_to_the_last_bit(
    loops: Decoders, table: tuple[list[float], dict[str, list[float]]], whole: list[list[float]]
) -> None:
    times, other = table
    columns = {Column(name, (("le", name),), "sum"): values for name, values in other.items()}
    rows = len(times)
    for at, values in enumerate(whole):
        columns[Column("count", (), str(at))] = (values * rows)[:rows]
    chunk = CounterChunk(bytes_reader(pack_counters(times, columns)), loops)
    assert list(chunk.times()) == times
    assert [column_of(row) for row, _ in chunk.columns] == list(columns)
    for place, values in enumerate(columns.values()):
        assert [v for v in numbers(chunk, place) if v == v] == [v for v in values if v == v]


def numbers(chunk: CounterChunk, place: int) -> list[float]:
    """A column's numbers."""
    kind, at = chunk.columns[place][1], chunk.starts[place]
    if kind == "i":
        return list(map(float, chunk.integers[at : at + chunk.rows]))
    return list(chunk.floats[at : at + chunk.rows]) if kind == "b" else [float(kind)] * chunk.rows


Rows = list[tuple[float, str | None]]
"""Scrapes: when, and why each failed or None."""

SCRAPES = st.lists(st.tuples(st.floats(0, 2e9), st.none() | st.text(max_size=20)), min_size=1)


def rows_of(scrapes: Scrapes) -> Rows:
    return [(t_s, scrapes.failed.get(at)) for at, t_s in enumerate(scrapes.times)]


@WITH_BOTH
@given(rows=SCRAPES, cut=st.integers(0, 20))
def test_scrapes_come_back_and_together(loops: Decoders, rows: Rows, cut: int) -> None:
    parts = [scrapes_from_rows(rows[:cut]), scrapes_from_rows(rows[cut:])]
    read = [unpack_scrapes(bytes_reader(pack_scrapes(part)), loops) for part in parts]
    assert rows_of(concat_scrapes(read)) == rows


@given(SCRAPES)
def test_thinned_scrapes_keep_every_failure_and_a_minute_its_success(rows: Rows) -> None:
    ordered = sorted(rows, key=lambda row: row[0])
    kept = rows_of(downsample_scrapes(scrapes_from_rows(ordered), step_s=60.0))
    assert [row for row in kept if row[1] is not None] == [
        row for row in ordered if row[1] is not None
    ]
    minutes = [t_s // 60 for t_s, why in kept if why is None]
    assert minutes == sorted({t_s // 60 for t_s, why in ordered if why is None})


@given(st.binary(), st.none() | st.binary(min_size=1))
def test_documents_come_back_alone_and_against_another(data: bytes, base: bytes | None) -> None:
    assert decompress_document(compress_document(data, base), base) == data


def test_a_document_takes_no_more_memory_than_its_bytes() -> None:
    verdict = diagnosis(0.0, values={f"signal_{at}": 1.0 for at in range(1000)})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        document = encode_document(verdict)
        kept_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1.1 * len(document)


def test_a_document_that_hardly_differs_takes_little() -> None:
    base = b"".join(
        b'{"rule":"R%d","state":"ok","value":%d}' % (at, at * 7919) for at in range(200)
    )
    assert (
        len(compress_document(base.replace(b"R77", b"R78"), base))
        < len(compress_document(base, None)) / 8
    )


@given(st.data())
def test_damage_is_refused_or_leaves_the_rest_as_it_was(data: st.DataObject) -> None:
    """A flipped bit never gives other numbers from a column that was compressed."""
    times = [1e9 + 5 * at for at in range(50)]
    columns = {f"s{at}": [math.sin(at + row) for row in range(50)] for at in range(3)}
    whole = pack_signals(times, columns)
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    broken = bytearray(whole)
    broken[place // 8] ^= 1 << place % 8
    wanted = {key: bits(array("d", array("f", column))) for key, column in columns.items()}
    try:
        chunk = SignalChunk(bytes_reader(bytes(broken)))
        found_times = chunk.times()
    except DamagedError:
        return
    assert list(found_times) == times
    for key in chunk.keys:
        try:
            unpacked = chunk.column(key)
        except DamagedError:
            continue
        assert bits(unpacked) == wanted[key]


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 20, 100])
def test_a_chunk_cut_short_is_refused(cut: int) -> None:
    whole = pack_counters([1.0, 2.0], {Column("a", ()): [1.0, 5.0], Column("b", ()): [0.5, 0.25]})
    with pytest.raises(DamagedError):
        CounterChunk(bytes_reader(whole[:cut]), PURE_PYTHON).times()


def test_counters_that_are_not_as_many_as_their_columns_say_are_refused() -> None:
    body = ChunkBody(bytes_reader(pack_counters([1.0, 2.0], {Column("a", ()): [1.0, 5.0]})))
    pieces = PieceWriter()
    directory = {
        **body.directory,
        "times": pieces.add(body.piece(body.directory["times"])),
        "whole": pieces.add(pack_integers([1])),
        "other": pieces.add(pack_integers([])),
    }
    with pytest.raises(DamagedError, match="counters"):
        CounterChunk(bytes_reader(pack_body(directory, pieces.data)), PURE_PYTHON)


@given(tables())
def test_one_scrape_of_a_chunk_is_read_as_its_columns_say(
    table: tuple[list[float], dict[str, list[float]]],
) -> None:
    chunk = SignalChunk(bytes_reader(pack_signals(*table)))
    for row in range(chunk.rows):
        scrape = chunk.values(row)
        assert list(scrape) == chunk.keys
        assert bits(list(scrape.values())) == bits([chunk.column(key)[row] for key in chunk.keys])


def test_a_column_has_no_row_beyond_its_end() -> None:
    with pytest.raises(DamagedError):
        value_in_column(pack_column([1.0, 2.0]), 2)
