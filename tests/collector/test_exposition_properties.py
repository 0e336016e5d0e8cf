"""Exposition text against prometheus_client, against itself and against noise."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as untyped_parser
from prometheus_client.parser import text_string_to_metric_families

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.exposition import Limits, PageParser, decompress, parse
from kneewatch.collector.page import Page
from tests.examples import examples

PAGES = sorted((Path(__file__).parents[1] / "fixtures" / "pages").glob("*.txt.gz"))
BUSY = "vllm-0.32.0-loaded.txt.gz"
OPENMETRICS = "application/openmetrics-text"

KINDS = ("exposition", "truncated", "too_large")

T = TypeVar("T")
Sample = tuple[str, dict[str, str], str, float | None]


def bounded(count: int) -> settings:
    """The same examples on every run, a tenth of them in `make quick`; no file left behind."""
    return settings(examples(count), derandomize=True, database=None)


def recorded(name: str) -> str:
    return gzip.decompress((PAGES[0].parent / name).read_bytes()).decode()


def samples(page: Page) -> list[Sample]:
    return [
        (series.name, dict(series.labels), repr(value), page.timestamps_s.get(position))
        for position, (series, value) in enumerate(
            zip(page.layout.series, page.values, strict=True)
        )
    ]


def reference(families: Iterable[Metric]) -> list[Sample]:
    return [
        (
            sample.name,
            dict(sample.labels),
            repr(float(sample.value)),
            None if sample.timestamp is None else float(sample.timestamp),
        )
        for family in families
        for sample in family.samples
    ]


def attempt(read: Callable[[], T]) -> T | ExpositionError:
    try:
        return read()
    except ExpositionError as exc:
        return exc


def openmetrics_reference(body: str) -> list[Metric]:
    untyped = cast("Any", untyped_parser)
    families: Iterable[Metric] = untyped.text_string_to_metric_families(body)
    return list(families)


def outcome(read: Callable[[str], Page], body: str) -> object:
    """All that can be told from a page or from its error."""
    page = attempt(lambda: read(body))
    if isinstance(page, ExpositionError):
        return str(page), page.line, page.kind
    layout = page.layout
    return samples(page), dict(layout.types), layout.repeated


# The same samples as prometheus_client


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_recorded_pages_hold_what_prometheus_client_finds(path: Path) -> None:
    body = recorded(path.name)
    page = parse(body)
    families = list(text_string_to_metric_families(body))
    assert samples(page) == reference(families)
    assert len(page.values) > 200
    assert page.layout.repeated == frozenset()
    stated = {
        name.removesuffix("_total") if kind == "counter" else name: kind  # it calls counters so
        for name, kind in page.layout.types.items()
    }
    assert stated == {family.name: family.type for family in families}


def test_the_recorded_pages_are_found() -> None:
    assert len(PAGES) >= 6


any_text = st.text(
    st.sampled_from('\\"\n{}[](),=# \t\r_aé\u2028\U0001f600\x00')
    | st.characters(exclude_categories=["Cs"]),
    max_size=8,
)
names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,6}", fullmatch=True)
label_names = st.from_regex(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,4}", fullmatch=True)
blanks = st.sampled_from(["", " ", "\t", "  "])
some_blanks = st.sampled_from([" ", "  "])
numbers = st.floats().map(repr) | st.sampled_from(
    # Not "-0", which prometheus_client reads as an integer and so without its sign.
    ["+Inf", "-Inf", "Inf", "NaN", "nan", "infinity", "1e5", "1E+05", ".5", "5.", "+5", "007"]
)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def label_blocks(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(label_names, any_text, max_size=3))
    between = [draw(blanks) for _ in range(4)]
    pairs = [
        f'{between[0]}{name}{between[1]}={between[2]}"{escaped(value)}"{between[3]}'
        for name, value in labels.items()
    ]
    comma = "," if draw(st.booleans()) and pairs else ""
    return f"{{{','.join(pairs)}{comma}}}"


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    block = draw(st.just("") | label_blocks())
    gap = draw(blanks) if block else " "
    timestamp = draw(st.just("") | st.integers(-(10**15), 10**15).map(lambda at: f" {at}"))
    return f"{draw(blanks)}{draw(names)}{block}{gap}{draw(numbers)}{timestamp}{draw(blanks)}"


@st.composite
def comment_lines(draw: st.DrawFn) -> str:
    help_text = draw(any_text.map(lambda text: text.replace("\n", "\\n").replace("\r", "")))
    kind = draw(st.sampled_from(["gauge", "histogram", "summary", "untyped"]))
    name = draw(names)
    return draw(
        st.sampled_from(
            ["", " ", "#", "# comment", f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        )
    )


pages = st.lists(sample_lines() | comment_lines(), max_size=6).map(
    lambda lines: "".join(f"{line}\n" for line in lines)
)


@bounded(250)
@given(pages)
def test_generated_pages_hold_what_prometheus_client_finds(body: str) -> None:
    assert samples(parse(body, content_type="text/plain")) == reference(
        text_string_to_metric_families(body)
    )


@st.composite
def openmetrics_families(draw: st.DrawFn, name: str) -> str:
    """A counter of one sample: prometheus_client also checks families, which we do not."""
    block = draw(st.just("") | label_blocks().map(lambda block: block.replace(",}", "}")))
    value = draw(st.floats(min_value=0, allow_infinity=False).map(repr))
    # It reads a negative time of part of a second wrongly, so none of these.
    seconds = st.integers(0, 10**10).map(str) | st.decimals(0, 10**9, places=3).map(str)
    timestamps = st.just("") | seconds.map(lambda at: f" {at}")
    trace = draw(any_text).replace('"', "")  # it loses count of escaped quotes in exemplars
    exemplar = f' # {{trace="{escaped(trace)}"}} {draw(numbers)}{draw(timestamps)}'
    tail = exemplar if draw(st.booleans()) else ""
    return f"# TYPE {name} counter\n{name}_total{block} {value}{draw(timestamps)}{tail}\n"


@st.composite
def openmetrics_pages(draw: st.DrawFn) -> str:
    count = draw(st.integers(0, 3))
    families = [draw(openmetrics_families(f"f{index}")) for index in range(count)]
    return "".join(families) + "# EOF\n"


@bounded(300)
@given(openmetrics_pages())
def test_generated_openmetrics_pages_hold_what_prometheus_client_finds(body: str) -> None:
    page = parse(body, content_type=OPENMETRICS)
    families = openmetrics_reference(body)
    expected = reference(families)
    samples_read = samples(page)
    assert [sample[:3] for sample in samples_read] == [sample[:3] for sample in expected]
    for ours, theirs in zip(samples_read, expected, strict=True):
        # Theirs adds up whole seconds and nanoseconds, ours is the nearest float.
        assert ours[3] == (None if theirs[3] is None else pytest.approx(theirs[3], rel=1e-15))


# The same page whatever was read before

tails = st.sampled_from(
    [
        *("5", "6.5", "NaN", "+Inf", "1_0", " 5", "5 ", "0x10", "infinity", "\u0661", "", "x"),
        *("5\r", "5 1500", "5 1.5", "5 6 7", '5 # {b="c"} 1', "5 # {} 1 2", "1,2", "5#"),
        *('{b="1"} 5', "{} 5", '"} 5'),
    ]
)
heads = st.sampled_from(["a ", "b ", 'a{b="1"} ', 'a{b="2"}', 'a{c="1",b="1"} ', '{"a"} ', "a  "])
other_lines = st.sampled_from(
    ["", " ", "#", "# EOF", "# TYPE a gauge", "# TYPE a counter", "# TYPE b gauge", "5", "nan", "a"]
)
lines = st.builds(str.__add__, heads, tails) | st.builds(str.__add__, heads, st.just("1"))


@st.composite
def scrapes(draw: st.DrawFn) -> list[str]:
    """Pages of one target, each made from the last by a few changes."""
    page = draw(st.lists(st.builds(str.__add__, heads, st.just("1")) | other_lines, max_size=6))
    if draw(st.booleans()):
        page.append("# EOF")
    bodies = ["\n".join([*page, ""])]
    for _ in range(draw(st.integers(1, 4))):
        page = page.copy()
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, len(page)))
            change = draw(st.sampled_from(["tail", "tail", "tail", "line", "insert", "delete"]))
            if change == "tail" and page[at : at + 1]:
                page[at] = page[at].rpartition(" ")[0] + " " + draw(tails)
            elif change == "insert":
                page.insert(at, draw(lines | other_lines))
            else:
                page[at : at + 1] = [draw(lines | other_lines)] if change == "line" else []
        end = draw(st.sampled_from(["\n", "\n", "\n", "", "\n\n"]))
        bodies.append("\n".join(page) + end)
    return bodies


def same_layout(page: Page, other: Page) -> bool:
    a, b = page.layout, other.layout
    return (a.series, a.types, a.repeated) == (b.series, b.types, b.repeated)


@bounded(400)
@given(scrapes(), st.sampled_from(["", "text/plain", OPENMETRICS]))
def test_what_was_read_before_changes_nothing(bodies: list[str], content_type: str) -> None:
    parser = PageParser()
    last: Page | None = None
    for body in bodies:
        fresh = outcome(lambda text: parse(text, content_type=content_type), body)
        assert outcome(lambda text: parser.parse(text, content_type=content_type), body) == fresh
        page = attempt(lambda: parser.parse(body, content_type=content_type))  # noqa: B023
        if isinstance(page, Page):
            if last is not None:
                assert (page.layout is last.layout) == same_layout(page, last)
            last = page


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, int, str]:
    """Where to cut a page, in thousandths, how much to take out and what to put in."""
    pieces = any_text | st.text("0123456789.eE+-_,", max_size=4) | tails
    return draw(st.integers(0, 1000)), draw(st.sampled_from([0, 1, 2, 100])), draw(pieces)


@bounded(150)
@given(st.lists(damages(), max_size=3), st.booleans())
def test_a_damaged_page_is_read_alike_with_and_without_the_one_before(
    changes: list[tuple[int, int, str]], cut: bool
) -> None:
    first = recorded(BUSY)
    body = first
    for thousandth, out, text in changes:
        at = len(body) * thousandth // 1000
        body = body[:at] + text + ("" if cut else body[at + out :])
    parser = PageParser()
    parser.parse(first)
    assert outcome(parser.parse, body) == outcome(parse, body)
    assert outcome(parser.parse, first) == outcome(parse, first)


# Noise: only an ExpositionError comes out

noise = st.lists(
    st.sampled_from(['a{b="', '"', "\\", "} 1", "# TYPE ", "# EOF", "\n", "\r\n", " # {", "a 1\n"])
    | any_text,
    max_size=12,
).map("".join)
small = Limits(body_bytes=200, series=3, labels=2, label_bytes=8)


@bounded(600)
@given(
    st.text(max_size=60) | noise | st.binary(max_size=60) | noise.map(str.encode),
    st.sampled_from(["", "text/plain", OPENMETRICS, ";", "\x00"]),
    st.sampled_from(["", "gzip", "deflate", "identity", "br", "\ud800"]),
    st.sampled_from([Limits(), small]),
)
def test_noise_gives_a_page_or_an_exposition_error(
    body: str | bytes, content_type: str, content_encoding: str, limits: Limits
) -> None:
    parser = PageParser(limits)
    page = attempt(
        lambda: parser.parse(body, content_type=content_type, content_encoding=content_encoding)
    )
    if isinstance(page, ExpositionError):
        assert page.kind in KINDS
        assert str(page).isprintable()
        assert len(str(page)) < 500
    else:
        assert len(page.values) == len(page.layout.series) <= limits.series
        assert all(isinstance(value, float) for value in page.values)
        assert all(math.isfinite(at_s) for at_s in page.timestamps_s.values())


@bounded(300)
@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 255))
def test_a_damaged_gzip_body_is_unpacked_or_refused(noise: bytes, at: int, byte: int) -> None:
    packed = bytearray(gzip.compress(noise * 5, mtime=0))
    packed[at % len(packed)] = byte
    plain = attempt(lambda: decompress(bytes(packed), "gzip", 100))
    assert plain.kind in KINDS if isinstance(plain, ExpositionError) else len(plain) <= 100
