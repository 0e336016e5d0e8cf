"""Columns, times, counters, scrapes and documents come out as they went in, or are refused."""

from __future__ import annotations

import math
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.store.arrays import (
    DamagedError,
    floats_of,
    pack_column,
    pack_integers,
    pack_times,
    to_bytes,
    unpack_column,
    unpack_integers,
    unpack_times,
    value_in_column,
)
from kneewatch.agent.store.chunk import SignalChunk, pack_signals, reading_from
from kneewatch.agent.store.counters import pack_counters, unpack_counters
from kneewatch.agent.store.documents import expand, squeeze
from kneewatch.agent.store.model import StoredScrape
from kneewatch.agent.store.scrapes import pack_scrapes, thinned, unpack_scrapes
from kneewatch.collector.history import Column

ANY = st.floats(allow_nan=True, allow_infinity=True)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
COUNTS = st.integers(0, 1 << 53).map(float)
LARGEST_FLOAT32 = 3.4028234663852886e38


def bits(values: array[float] | list[float]) -> list[bytes]:
    """Bit patterns, for NaN is not equal to itself; all NaN are one."""
    return [b"nan" if v != v else struct.pack("<d", v) for v in values]


@given(st.lists(INT64))
def test_integers_come_back(values: list[int]) -> None:
    assert list(unpack_integers(pack_integers(values))) == values


@given(st.lists(ANY))
def test_times_come_back_to_the_last_bit(times: list[float]) -> None:
    assert bits(unpack_times(pack_times(times))) == bits(times)


@given(st.lists(ANY))
def test_a_column_keeps_seven_digits(column: list[float]) -> None:
    found = unpack_column(pack_column(column))
    assert bits(found) == bits(array("d", array("f", column)))
    for told, value in zip(found, column, strict=True):
        if math.isfinite(value) and abs(value) <= LARGEST_FLOAT32:
            assert abs(told - value) <= 6e-8 * abs(value) + 1e-44


@given(st.lists(ANY))
def test_bytes_of_arrays_come_back(values: list[float]) -> None:
    assert bits(floats_of("d", to_bytes(array("d", values)))) == bits(values)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[float], dict[str, list[float]]]:
    rows = draw(st.integers(1, 12))
    column = st.lists(ANY, min_size=rows, max_size=rows)
    steady = ANY.map(lambda value: [value] * rows)
    names = st.text(min_size=1, max_size=8)
    columns = draw(st.dictionaries(names, st.one_of(column, steady), max_size=6))
    return draw(st.lists(st.floats(0, 2e9), min_size=rows, max_size=rows)), columns


@given(tables())
def test_a_chunk_of_signals_comes_back_column_by_column(
    table: tuple[list[float], dict[str, list[float]]],
) -> None:
    times, columns = table
    chunk = SignalChunk(reading_from(pack_signals(times, columns)))
    assert chunk.keys == list(columns)
    assert list(chunk.times()) == times
    for key, column in columns.items():
        told = chunk.column(key)
        flat = all(v == column[0] or (v != v and column[0] != column[0]) for v in column)
        exact = flat and not math.isinf(column[0])
        wanted = column if exact else array("d", array("f", column))
        assert [v if v else 0.0 for v in bits(told)] == [v if v else 0.0 for v in bits(wanted)]
    assert all(map(math.isnan, chunk.column("no such signal\n")))


@given(tables(), st.lists(st.lists(COUNTS, min_size=3, max_size=3), max_size=4))
def test_counters_come_back_to_the_last_bit(
    table: tuple[list[float], dict[str, list[float]]], whole: list[list[float]]
) -> None:
    times, other = table
    columns = {Column(name, (("le", name),), "sum"): values for name, values in other.items()}
    rows = len(times)
    for at, values in enumerate(whole):
        columns[Column("count", (), str(at))] = (values * rows)[:rows]
    found = list(unpack_counters(reading_from(pack_counters(times, columns))))
    assert [snapshot.t_s for snapshot in found] == times
    for at, snapshot in enumerate(found):
        assert snapshot.values == {
            column: values[at] for column, values in columns.items() if values[at] == values[at]
        }


SCRAPES = st.lists(
    st.builds(StoredScrape, st.floats(0, 2e9), st.just(value=True), st.just(""))
    | st.builds(StoredScrape, st.floats(0, 2e9), st.just(value=False), st.text(max_size=20)),
    min_size=1,
)


@given(SCRAPES)
def test_scrapes_come_back(scrapes: list[StoredScrape]) -> None:
    assert unpack_scrapes(reading_from(pack_scrapes(scrapes))) == scrapes


@given(SCRAPES)
def test_thinned_scrapes_keep_every_failure_and_a_minute_its_success(
    scrapes: list[StoredScrape],
) -> None:
    ordered = sorted(scrapes)
    kept = thinned(ordered, step_s=60.0)
    assert [s for s in kept if not s.ok] == [s for s in ordered if not s.ok]
    minutes = [s.t_s // 60 for s in kept if s.ok]
    assert minutes == sorted({s.t_s // 60 for s in ordered if s.ok})


@given(st.binary(), st.none() | st.binary(min_size=1))
def test_documents_come_back_alone_and_against_another(data: bytes, base: bytes | None) -> None:
    assert expand(squeeze(data, base), base) == data


def test_a_document_that_hardly_differs_takes_little() -> None:
    base = b"".join(
        b'{"rule":"R%d","state":"ok","value":%d}' % (at, at * 7919) for at in range(200)
    )
    assert len(squeeze(base.replace(b"R77", b"R78"), base)) < len(squeeze(base, None)) / 8


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
        chunk = SignalChunk(reading_from(bytes(broken)))
        found_times = chunk.times()
    except DamagedError:
        return
    assert list(found_times) == times
    for key in chunk.keys:
        try:
            found = chunk.column(key)
        except DamagedError:
            continue
        assert bits(found) == wanted[key]


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 20, 100])
def test_a_chunk_cut_short_is_refused(cut: int) -> None:
    whole = pack_counters([1.0, 2.0], {Column("a", ()): [1.0, 5.0], Column("b", ()): [0.5, 0.25]})
    with pytest.raises(DamagedError):
        list(unpack_counters(reading_from(whole[:cut])))


@given(tables())
def test_one_scrape_of_a_chunk_is_read_as_its_columns_say(
    table: tuple[list[float], dict[str, list[float]]],
) -> None:
    chunk = SignalChunk(reading_from(pack_signals(*table)))
    for row in range(chunk.rows):
        told = chunk.values(row)
        assert list(told) == chunk.keys
        assert bits(list(told.values())) == bits([chunk.column(key)[row] for key in chunk.keys])


def test_a_column_has_no_row_beyond_its_end() -> None:
    with pytest.raises(DamagedError):
        value_in_column(pack_column([1.0, 2.0]), 2)
