"""Gzip that is whole, cut, damaged or padded, however it is fed."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kneewatch.collector.captures.format import TEXT_MAX_BYTES, Damage, Members, text_of
from tests.examples import examples

NOISE = random.Random(1).randbytes(3_000_000)


def fed(data: bytes, step_bytes: int) -> list[bytes | Damage]:
    return list(text_of(data[i : i + step_bytes] for i in range(0, len(data), step_bytes)))


def joined(items: Iterable[bytes | Damage]) -> bytes:
    return b"".join(item for item in items if isinstance(item, bytes))


def damages(items: Iterable[bytes | Damage]) -> list[str]:
    return [item.text for item in items if isinstance(item, Damage)]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1), st.integers(1, 400), st.integers(0, 20))
def test_whole_members_give_their_text(texts: list[bytes], step_bytes: int, zeros: int) -> None:
    data = b"".join(gzip.compress(text) + bytes(zeros) for text in texts)
    items = fed(data, step_bytes)
    assert joined(items) == b"".join(texts)
    assert not damages(items)


@settings(deadline=None)
@given(st.binary().filter(lambda data: not data.startswith(b"\x1f\x8b")), st.integers(1, 9))
def test_anything_else_is_plain(data: bytes, step_bytes: int) -> None:
    items = fed(data, step_bytes)
    assert joined(items) == data
    assert not damages(items)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=400), st.binary(max_size=400), st.data(), st.integers(1, 500))
def test_cut_member_is_left_at_the_next_head(
    first: bytes, second: bytes, data: st.DataObject, step_bytes: int
) -> None:
    whole = gzip.compress(first)
    cut = whole[: data.draw(st.integers(2, len(whole) - 1))]
    items = fed(cut + gzip.compress(second), step_bytes)
    assert joined(items).endswith(second)
    assert damages(items)


@pytest.mark.parametrize("step_bytes", [1_000, 100_000, 10_000_000])
@pytest.mark.parametrize("text", [NOISE, b"".join(b"%d\n" % i for i in range(400_000))])
def test_large_cut_member_keeps_what_it_had(text: bytes, step_bytes: int) -> None:
    whole = gzip.compress(text, 1)
    items = fed(whole[: len(whole) * 2 // 3] + gzip.compress(b"next"), step_bytes)
    before = joined(items).removesuffix(b"next")
    assert len(before) < len(joined(items))
    assert before.startswith(text[: len(text) // 2])
    assert len(damages(items)) == 1


@examples(200)
@given(st.integers(0, 2_000), st.integers(1, 255), st.integers(1, 1_500))
@example(0, 1, 7)
def test_flipped_bits_cost_one_member(at: int, flip: int, step_bytes: int) -> None:
    texts = [b"".join(b"%d %d\n" % (i, j * i) for j in range(30)) for i in range(20)]
    data = bytearray(b"".join(gzip.compress(text) for text in texts))
    at = min(at, len(data) - 1)
    data[at] ^= flip
    items = fed(bytes(data), step_bytes)
    if at < 2:
        return  # no gzip by its first bytes, hence plain
    assert sum(text in joined(items) for text in texts) >= len(texts) - 1


def test_sync_flushed_stream_is_read_up_to_its_end() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    data = b"".join(
        packer.compress(b"line %d\n" % i) + packer.flush(zlib.Z_SYNC_FLUSH) for i in range(50)
    )
    items = fed(data, 64)
    assert joined(items) == b"".join(b"line %d\n" % i for i in range(50))
    assert damages(items) == ["the file ends inside a gzip stream (cut short, or still written)"]


def test_text_comes_while_the_file_grows() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    members = Members()
    for number in range(20):
        line = b"line %d\n" % number
        data = packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH)
        assert joined(members.feed(data)) == line


@pytest.mark.parametrize("foreign", [b"garbage", b"\x00\x00x", b"\x1f", b"\x1f\x8b", NOISE[:9_999]])
def test_foreign_bytes_are_passed_over(foreign: bytes) -> None:
    data = gzip.compress(b"one\n")
    for step_bytes in (1, 5, 100_000):
        between = fed(data + foreign + data, step_bytes)
        assert joined(between) == b"one\none\n"
        assert len(damages(between)) == 1
        behind = fed(data + foreign, step_bytes)
        assert joined(behind) == b"one\n"
        assert len(damages(behind)) == 1


def test_small_file_that_unpacks_to_a_huge_text_comes_in_pieces() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = b"".join(packer.compress(bytes(TEXT_MAX_BYTES)) for _ in range(40))
    data += packer.flush(zlib.Z_SYNC_FLUSH)
    for whole in (data, data + packer.flush()):
        sizes = [len(item) for item in text_of([whole]) if isinstance(item, bytes)]
        assert sum(sizes) == 40 * TEXT_MAX_BYTES
        assert max(sizes) == TEXT_MAX_BYTES


def test_nothing_is_held_back_at_the_end_of_a_cut_file() -> None:
    data = gzip.compress(bytes(TEXT_MAX_BYTES + 200))
    for cut in range(len(data) - 40, len(data)):
        oracle = zlib.decompressobj(31)
        assert joined(fed(data[:cut], 100_000)) == oracle.decompress(data[:cut])
