"""Which form of an answer is given to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.api.responses import HTML, JSON, MARKDOWN, MEDIA_TYPES, TEXT, Problem, form_of

FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        pytest.param("*/*", TEXT, id="curl"),
        pytest.param(None, TEXT, id="nothing said"),
        pytest.param(" ", TEXT, id="nothing but a space"),
        pytest.param(FIREFOX, HTML, id="a browser"),
        pytest.param("application/json, text/plain, */*", JSON, id="a script"),
        ("text/markdown", MARKDOWN),
        ("Text/Markdown ; charset=utf-8", MARKDOWN),
        ("text/*", TEXT),
        ("application/*", JSON),
        ("application/json;q=0.2, text/markdown;q=0.9", MARKDOWN),
        pytest.param("application/json;q=0, */*;q=0.1", TEXT, id="anything but JSON"),
        pytest.param("image/png, */*;q=0.1", TEXT, id="rather a picture"),
        pytest.param("application/json;q=x, text/plain;q=0.1", TEXT, id="a q that is none"),
    ],
)
def test_the_form_follows_the_accept_header(accept: str | None, form: str) -> None:
    assert form_of(None, accept, (TEXT, JSON, MARKDOWN, HTML)) == form


@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_the_format_goes_before_the_header(form: str) -> None:
    assert form_of(form, FIREFOX) == form


def test_a_strange_format_is_refused_with_the_choices() -> None:
    with pytest.raises(Problem, match="format must be one of text, json") as refused:
        form_of("yaml", "*/*")
    assert refused.value.status == 422


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0", ";;;,,,"])
def test_what_cannot_be_had_is_406(accept: str) -> None:
    with pytest.raises(Problem, match="text/plain, application/json") as refused:
        form_of(None, accept)
    assert refused.value.status == 406


@given(st.text(max_size=200))
def test_any_header_gives_a_form_or_406(accept: str) -> None:
    try:
        answer: object = form_of(None, accept)
    except Problem as problem:
        answer = problem.status
    assert answer in (*MEDIA_TYPES, 406)
