"""The body of a page: unpacking it, its encoding and its bounds."""

from __future__ import annotations

import gzip
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest

from kneewatch.collector import exposition
from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.exposition import Limits, PageParser, decompress, parse
from kneewatch.collector.page_memory import PageMemory, page_bytes

RECORDED = Path(__file__).parents[1] / "fixtures" / "pages"


def recorded(name: str) -> str:
    return gzip.decompress((RECORDED / f"{name}.txt.gz").read_bytes()).decode()


def refused(body: str | bytes, *, content_encoding: str = "") -> ExpositionError:
    with pytest.raises(ExpositionError) as caught:
        parse(body, content_encoding=content_encoding)
    return caught.value


# Compression


def test_a_compressed_body_is_unpacked() -> None:
    plain = recorded("vllm-0.28.0-loaded").encode()
    halves = gzip.compress(plain[:9000]) + gzip.compress(plain[9000:])
    expected = parse(plain)
    for body, encoding in [
        (gzip.compress(plain, mtime=0), "gzip"),
        (gzip.compress(plain), " X-GZIP"),
        (halves, "gzip"),
        (zlib.compress(plain), "deflate"),
        (plain, "identity"),
    ]:
        page = parse(body, content_encoding=encoding)
        assert page.layout.series == expected.layout.series
        assert page.values == expected.values
    assert parse("a 1\n", content_encoding="gzip").values == [1]  # a str has been unpacked before


@pytest.mark.parametrize("kept_bytes", [0, 5, 10, 500, -9, -1])
def test_a_cut_gzip_body_is_truncated(kept_bytes: int) -> None:
    body = gzip.compress(recorded("vllm-0.28.0-loaded").encode())
    assert refused(body[:kept_bytes], content_encoding="gzip").kind == "truncated"


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        pytest.param(b"a 1\n", "gzip", id="not gzip"),
        pytest.param(gzip.compress(b"a 1\n")[:-8] + b"12345678", "gzip", id="wrong checksum"),
        pytest.param(gzip.compress(b"a 1\n") + b"rubbish", "gzip", id="rubbish after it"),
        pytest.param(gzip.compress(b"") * 1000, "gzip", id="a thousand empty parts"),
        pytest.param(b"a 1\n", "br", id="unknown encoding"),
        pytest.param(gzip.compress(gzip.compress(b"a 1\n")), "gzip, gzip", id="packed twice"),
    ],
)
def test_a_damaged_or_unknown_encoding_is_refused(body: bytes, encoding: str) -> None:
    assert refused(body, content_encoding=encoding).kind == "exposition"


@pytest.mark.parametrize("parts", [1, 3])
def test_unpacking_stops_at_the_limit(parts: int) -> None:
    zeros = 30_000
    body = gzip.compress(b"0" * zeros) * parts
    assert decompress(body, "gzip", zeros * parts) == b"0" * zeros * parts
    with pytest.raises(ExpositionError) as caught:
        decompress(body, "gzip", zeros * parts - 1)
    assert caught.value.kind == "too_large"


def test_a_packed_body_over_the_limit_is_not_unpacked() -> None:
    with pytest.raises(ExpositionError) as caught:
        decompress(gzip.compress(b"0"), "gzip", 20)
    assert caught.value.kind == "too_large"


@pytest.mark.parametrize(
    ("body", "kind", "line"),
    [
        pytest.param(b'a 1\na{b="\xff"} 1\n', "exposition", 2, id="not UTF-8"),
        pytest.param("a 1\nb 1\nc é".encode()[:-1], "truncated", 3, id="cut within a character"),
        pytest.param('a 1\na{b="\ud800"} 1\n', "exposition", 2, id="half a surrogate pair"),
    ],
)
def test_text_that_is_not_utf8_is_refused(body: str | bytes, kind: str, line: int) -> None:
    error = refused(body)
    assert (error.kind, error.line) == (kind, line)


# Limits


@pytest.mark.parametrize(
    ("limits", "fits", "too_much"),
    [
        pytest.param(Limits(body_bytes=4), b"a 1\n", b"a 10\n", id="bytes"),
        pytest.param(Limits(body_bytes=11), 'a{b="é"} 1', 'a{b="é"} 1\n', id="bytes of a str"),
        pytest.param(Limits(series=2), "a 1\n" * 2, "a 1\n" * 3, id="series, repeated ones too"),
        pytest.param(Limits(series=2), "a 1\na 1", "a 1\na 1\na 1", id="series, no line feed"),
        pytest.param(Limits(series=2), "a 1\n" + "\n" * 7, "a 1\n" + "\n" * 8, id="lines"),
        pytest.param(Limits(labels=1), 'a{b="1"} 1\n', 'a{b="1",c="2"} 1\n', id="labels"),
        pytest.param(Limits(label_bytes=5), 'a{b="12345"} 1\n', 'a{b="123456"} 1\n', id="value"),
        pytest.param(Limits(label_bytes=5), 'a{b="1éé"} 1\n', 'a{b="ééé"} 1\n', id="as UTF-8"),
        pytest.param(Limits(label_bytes=5), 'a{bcdef=""} 1\n', 'a{bcdefg=""} 1\n', id="label"),
        pytest.param(Limits(label_bytes=5), "abcde 1\n", "abcdef 1\n", id="name"),
        pytest.param(Limits(label_bytes=5), '{"abcde"} 1\n', '{"abcdef"} 1\n', id="quoted name"),
        pytest.param(
            Limits(label_bytes=5), "# TYPE abcde info\n", "# TYPE abcdef info\n", id="family"
        ),
        pytest.param(
            Limits(labels=1), 'a 1 # {b=""} 1\n# EOF', 'a 1 # {b="",c=""} 1\n# EOF', id="exemplar"
        ),
    ],
)
def test_a_page_beyond_a_limit_is_too_large(
    limits: Limits, fits: str | bytes, too_much: str | bytes
) -> None:
    parser = PageParser(limits)
    parser.parse(fits)
    with pytest.raises(ExpositionError) as caught:
        parser.parse(too_much)
    assert caught.value.kind == "too_large"


def test_a_page_of_blank_lines_costs_little() -> None:
    began_s = time.thread_time()
    with pytest.raises(ExpositionError, match="lines"):
        PageParser().parse(b"\n" * 16_000_000)
    assert time.thread_time() - began_s < 3.0, "10 s when each line was looked at"


def page_of(name: str, labels: int = 0, series: int = 3_000) -> str:
    """A page that may take more than is always allowed."""
    own = ",".join(f'l{at}="x"' for at in range(labels))
    return "".join(f"{name}_{number}{{{own}}} 1\n" for number in range(series))


def test_new_series_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parser, other = PageParser(), PageParser()
    memory = PageMemory(2.5 * page_bytes(page_of("kept").encode()))
    monkeypatch.setattr(exposition, "PAGES", memory)
    page = parser.parse(page_of("kept"))
    changed = page_of("newer")
    parser.parse(changed)
    with pytest.raises(ExpositionError, match="no memory for a page that takes 3 MiB") as caught:
        other.parse(page_of("more"))
    assert caught.value.kind == "too_large"
    parser.parse(changed.replace(" 1", " 2"))
    assert page.values
    del page
    other.parse(page_of("more"))
    memory.limit_bytes = 0.0
    other.parse("small 1\n" * 100)


def test_labels_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "PAGES", PageMemory(50e6))
    PageParser().parse(page_of("few", labels=10))
    with pytest.raises(ExpositionError, match="no memory"):
        PageParser().parse(page_of("many", labels=100))


@pytest.mark.parametrize(
    "text",
    [
        page_of("labels", labels=100),
        page_of("series", series=40_000),
        "# " + "x" * 8_000_000 + "\nvllm:x 1\n",
        "# " + "x" * 8_000_000 + "\U0001f600\nvllm:x 1\n",
        "".join(f"# TYPE a{at} gauge\n" for at in range(100_000)),
    ],
    ids=("labels", "series", "text", "wide", "types"),
)
def test_no_page_takes_more_memory_than_counted(text: str) -> None:
    body = text.encode()
    tracemalloc.start()
    PageParser().parse(body)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < page_bytes(body)
