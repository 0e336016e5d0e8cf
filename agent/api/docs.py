"""The pages under `/docs`: the API reference, which is made from the OpenAPI document, the
glossary, and the pages about causes and rules.

I/O edge: pages and the stylesheet are read from the package. No page loads a script, or a file from
another server.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api.responses import HTML, JSON, MARKDOWN, MEDIA_TYPES, Problem, form_of

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


def framed(title: str, stylesheet: str, body: str) -> str:
    """A complete HTML page. `title` and `body` are HTML; `stylesheet` is a relative address."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="{stylesheet}">
</head><body><main>
{body}
</main></body></html>
"""


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
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    links = (
        f'<p><a href="{up}../triage">Triage page</a> · <a href="{up}causes/index">Causes</a> · '
        f'<a href="{up}rules/index">Rules</a> · <a href="{up}{GLOSSARY}">Glossary</a></p>'
    )
    return framed(title, f"{up}reference.css", f"{links}\n{body}")


# --- The API reference ----------------------------------------------------------------------------


JsonObject = Mapping[str, Any]


def reference_page(document: JsonObject) -> str:
    """The API reference as HTML. Its links are relative to /docs."""
    info = document["info"]
    lines = [
        f"<h1>{_text(info['title'])} {_text(info['version'])}</h1>",
        f"<p>{_text(info['description'])}</p>",
        '<p><a href="triage">Triage page</a> · <a href="openapi.json">OpenAPI document</a> · '
        '<a href="docs/causes/index">Causes</a> · <a href="docs/rules/index">Rules</a></p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(path, method, operation)
    return framed(f"{_text(info['title'])} API", "docs/reference.css", "\n".join(lines))


def _operation(path: str, method: str, operation: JsonObject) -> Iterator[str]:
    yield f"<section><h2><code>{_text(method.upper())} {_text(path)}</code></h2>"
    yield f"<p>{_text(operation.get('description') or operation.get('summary', ''))}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        heads = "<th>parameter</th><th>type</th><th>description</th>"
        yield f"<table><thead><tr>{heads}</tr></thead><tbody>"
    for parameter in parameters:
        kind = f"{parameter['schema'].get('type', 'text')}, in {parameter['in']}"
        yield (
            f"<tr><td><code>{_text(parameter['name'])}</code></td><td>{_text(kind)}</td>"
            f"<td>{_text(parameter.get('description', ''))}{_examples_of(parameter)}</td></tr>"
        )
    if parameters:
        yield "</tbody></table>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h3>Body: {_text(kind)}</h3>{_example(content)}"
    for status, response in operation["responses"].items():
        name = "otherwise" if status == "default" else status
        yield f"<h3>{_text(name)}: {_text(response['description'])}</h3>"
        for kind, content in response.get("content", {}).items():
            if "example" in content:
                yield f"<details><summary>{_text(kind)}</summary>{_example(content)}</details>"
    yield "</section>"


def _examples_of(parameter: JsonObject) -> str:
    rows = [parameter["example"]] if "example" in parameter else []
    rows += [example["value"] for example in parameter.get("examples", {}).values()]
    examples = ", ".join(f"<code>{_text(str(row))}</code>" for row in rows if row != "")
    return f" Examples: {examples}." if examples else ""


def _example(content: JsonObject) -> str:
    example = content["example"]
    text = example if isinstance(example, str) else json.dumps(example, indent=2)
    return f"<pre>{html.escape(text)}</pre>"


def _text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
