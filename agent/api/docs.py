"""The pages under `/docs`: the API reference, which is made from the OpenAPI document, the
glossary, and the pages about causes and rules.

I/O edge: pages and the stylesheet are read from the package. No page loads a script, or a file from
another server.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api.responses import HTML, JSON, MARKDOWN, MEDIA_TYPES, Problem, form_of
from kneewatch.collector.packaged import packaged_text

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDERS = ("causes", "rules")
GLOSSARY = "glossary"
SHORT_PATHS = {
    "/docs/": "../docs",
    **{f"/docs/{folder}": f"{folder}/index" for folder in FOLDERS},
    **{f"/docs/{folder}/": "index" for folder in FOLDERS},
}
"""Paths that people type, with the relative address to which they lead."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
GENERATED_NOTE = re.compile(r"<!--.*?-->\n?", re.DOTALL)
FOLDED = re.compile(
    r"<p>&lt;details[^\n]*\n&lt;summary&gt;(.*?)&lt;/summary&gt;</p>(.*?)<p>&lt;/details&gt;</p>",
    re.S,
)
LINK = re.compile(r'(<a href="[^":#]*?)\.md(#[^"]*)?"')


def add_docs(app: FastAPI) -> None:
    """Add the endpoints under `/docs` to an app."""

    async def document() -> Response:
        return Response(orjson.dumps(app.openapi()), media_type=MEDIA_TYPES[JSON])

    async def reference() -> Response:
        return Response(reference_page(app.openapi()), media_type=MEDIA_TYPES[HTML])

    async def stylesheet() -> Response:
        # Jinja, which that module imports, is needed by pages only.
        from kneewatch.reports.templates import palette

        css = palette() + (files("kneewatch.agent.api") / "reference.css").read_text("utf-8")
        return Response(css, headers={"content-type": "text/css; charset=utf-8"})

    async def glossary(request: Request) -> Response:
        return await _manual_page(request, "", GLOSSARY)

    for path, endpoint in (
        ("/openapi.json", document),
        ("/docs", reference),
        ("/docs/reference.css", stylesheet),
        ("/docs/glossary", glossary),
        ("/docs/{folder}/{name}", _manual_page),
    ):
        app.add_api_route(path, endpoint, include_in_schema=False, response_class=Response)
    for path in SHORT_PATHS:
        app.add_route(path, _redirect)


async def _redirect(request: Request) -> Response:
    return RedirectResponse(SHORT_PATHS[request.url.path])


async def _manual_page(request: Request, folder: str, name: str) -> Response:
    """A page of the manual: as HTML for browsers, as Markdown for other clients."""
    form = form_of(
        request.query_params.get("format"), request.headers.get("accept"), (MARKDOWN, HTML)
    )
    markdown = source(folder, name)
    if markdown is None:
        raise Problem(HTTPStatus.NOT_FOUND, "no such page; see /docs/causes/index")
    text = rendered(markdown, up="../" if folder else "") if form == HTML else markdown
    return Response(text, media_type=MEDIA_TYPES[form])


@cache
def _environment() -> Environment:
    # Lazy, as below: most daemons never serve a page.
    from kneewatch.reports.templates import environment

    filters = {"words": _words, "source": _source, "examples": _examples}
    return environment(lambda name: packaged_text("agent.api", name), filters, {})


# --- The manual -----------------------------------------------------------------------------------


def source(folder: str, name: str) -> str | None:
    """The Markdown of a page; None if the page does not exist. For the glossary, `folder` is ""."""
    if not NAME.fullmatch(name) or folder not in (*FOLDERS, ""):
        return None
    # The folders of pages are not packages, so they are looked up from kneewatch.docs.
    page = files("kneewatch.docs").joinpath(*([folder] if folder else []), f"{name}.md")
    return GENERATED_NOTE.sub("", page.read_text("utf-8")) if page.is_file() else None


def rendered(markdown: str, *, up: str) -> str:
    """A page as HTML. `up` is the relative path from the page to /docs/: "../" or ""."""
    # Imported here to save memory: most daemons never serve a page.
    from markdown_it import MarkdownIt

    # Conditions are lists in lists, deeper than the parser's default of 20.
    options = {"html": False, "maxNesting": 100}
    body = MarkdownIt("commonmark", options).enable("table").render(markdown)
    # Pages link to each other as files of the repository; here addresses have no file ending.
    body = FOLDED.sub(r"<details><summary>\1</summary>\2</details>", LINK.sub(r'\1\2"', body))
    title = markdown.partition("\n")[0].removeprefix("# ")
    page = _environment().get_template("manual.html.j2")
    return page.render(title=title, up=up, body=Markup(body))


# --- The API reference ----------------------------------------------------------------------------


JsonObject = Mapping[str, Any]


def reference_page(document: JsonObject) -> str:
    """The API reference as HTML. Its links are relative to /docs."""
    return _environment().get_template("reference.html.j2").render(document, up="docs/")


def _examples(parameter: JsonObject) -> list[str]:
    rows = [parameter["example"]] if "example" in parameter else []
    rows += [example["value"] for example in parameter.get("examples", {}).values()]
    return [str(row) for row in rows if row != ""]


def _source(example: object) -> Markup:
    text = example if isinstance(example, str) else json.dumps(example, indent=2)
    return Markup(html.escape(text))


def _words(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text)))
