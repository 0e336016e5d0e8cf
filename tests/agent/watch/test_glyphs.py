"""Characters and lines: what other machines say steers nothing, whatever the width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.watch.rendering import (
    ASCII,
    PLAIN_TONES,
    TONES,
    UNICODE,
    Glyphs,
    cells,
    glyphs_for,
    spread,
)

BOTH = pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])


@BOTH
@given(text=st.text(), width=st.integers(1, 60))
def test_fit_is_exactly_so_wide(glyphs: Glyphs, text: str, width: int) -> None:
    fitted = glyphs.fit(text, width)
    assert cells(fitted) == width
    assert fitted.isprintable()
    assert glyphs.unicode or fitted.isascii()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("vllm", 6, "vllm  "),
        ("vllm-prod-7", 8, "vll…od-7"),
        ("模型七", 5, "模…七"),
        ("模型七", 4, "…七 "),
        ("模型", 4, "模型"),
        ("a\x1b[2Jb", 6, "a?[2Jb"),
    ],
)
def test_fit(text: str, width: int, shown: str) -> None:
    assert UNICODE.fit(text, width) == shown


@BOTH
@given(text=st.text(), width=st.integers(20, 100), indent=st.integers(0, 5))
def test_folded_lines_fit_and_lose_nothing(
    glyphs: Glyphs, text: str, width: int, indent: int
) -> None:
    lines = glyphs.folded(text, width, indent=indent)
    assert all(cells(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    assert glyphs.unicode or all(line.isascii() for line in lines)
    assert "".join("".join(lines).split()) == "".join(glyphs.clean(text).split())


@BOTH
@pytest.mark.parametrize("width", range(-1, 8))
@pytest.mark.parametrize("text", [" é", "  a b", "", " ", " 模型"])
def test_folding_ends_where_there_is_no_room(glyphs: Glyphs, text: str, width: int) -> None:
    lines = glyphs.folded(text, width, indent=3)
    assert "".join("".join(lines).split()) == "".join(glyphs.clean(text).split())


def test_a_number_keeps_its_unit() -> None:
    text = "KV usage 97 % and 12 ms and 4 s more"
    for width in range(20, 40):
        lines = UNICODE.folded(text, width)
        assert not any(line.lstrip().startswith(("%", "ms", "s ")) for line in lines), lines


@pytest.mark.parametrize(
    ("environ", "encoding", "unicode"),
    [
        ({"LANG": "C.UTF-8"}, "utf-8", True),
        ({"LANG": "de_DE.utf8"}, "UTF-8", True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "", "LC_CTYPE": "en_US.UTF-8"}, "utf-8", True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LANG": "en_US.UTF-8", "LC_CTYPE": "C.UTF-8"}, "utf-8", True),
        ({}, "utf-8", False),
        ({"LANG": "en_US.ISO-8859-1"}, "iso8859-1", False),
        ({"LANG": "en_US.UTF-8", "TERM": "linux"}, "utf-8", False),
    ],
    ids=str,
)
def test_more_than_ascii_in_a_utf8_locale_only(
    environ: dict[str, str], encoding: str, unicode: bool
) -> None:
    assert glyphs_for(environ, encoding).unicode is unicode


def test_ascii_is_ascii() -> None:
    drawn = (ASCII.bars, ASCII.bound, ASCII.rule, ASCII.cut, ASCII.marker, ASCII.at_most)
    assert "".join(drawn).isascii()


def test_no_colour_without_colour() -> None:
    assert PLAIN_TONES.keys() == TONES.keys()
    assert set(PLAIN_TONES.values()) <= {"", "bold", "dim", "reverse"}


def test_only_the_sixteen_colours() -> None:
    words = {word for style in TONES.values() for word in style.split()}
    assert words <= {"bold", "dim", "reverse", "red", "green", "yellow", "magenta", "cyan"}


def test_spread() -> None:
    assert spread((("ab", ""),), (("c", "faint"),), 6) == (("ab", ""), ("   ", ""), ("c", "faint"))
    assert spread((("abcde", ""),), (("c", ""),), 6) == (("abcde", ""),)
