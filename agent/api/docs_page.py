"""`/docs`: the OpenAPI document as an HTML page without scripts and external files. Pure, except
that the stylesheet is read from the package."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

Json = Mapping[str, Any]


def page(document: Json) -> str:
    """The HTML of the page; its links are relative to /docs."""
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


def framed(title: str, stylesheet: str, body: str) -> str:
    """A whole page: `title` and `body` are HTML, `stylesheet` is its relative address."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="{stylesheet}">
</head><body><main>
{body}
</main></body></html>
"""


@cache
def stylesheet() -> bytes:
    """The page's CSS."""
    return (files("kneewatch.agent.api") / "reference.css").read_bytes()


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    yield f"<section><h2><code>{_text(method.upper())} {_text(path)}</code></h2>"
    yield f"<p>{_text(operation.get('description') or operation.get('summary', ''))}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "<table><thead><tr><th>parameter</th><th>type</th><th>what</th></tr></thead><tbody>"
    for parameter in parameters:
        kind = f"{parameter['schema'].get('type', 'text')}, in {parameter['in']}"
        yield (
            f"<tr><td><code>{_text(parameter['name'])}</code></td><td>{_text(kind)}</td>"
            f"<td>{_text(parameter.get('description', ''))}{_given(parameter)}</td></tr>"
        )
    if parameters:
        yield "</tbody></table>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h3>Body: {_text(kind)}</h3>{_example(content)}"
    for status, response in operation["responses"].items():
        name = "otherwise" if status == "default" else status
        yield f"<h3>{_text(name)}: {_text(response['description'])}</h3>"
        for kind, content in response.get("content", {}).items():
            if "problem" not in kind:
                yield f"<details><summary>{_text(kind)}</summary>{_example(content)}</details>"
    yield "</section>"


def _given(parameter: Json) -> str:
    rows = [parameter["example"]] if "example" in parameter else []
    rows += [example["value"] for example in parameter.get("examples", {}).values()]
    examples = ", ".join(f"<code>{_text(str(row))}</code>" for row in rows)
    return f" Such as {examples}." if examples else ""


def _example(content: Json) -> str:
    example = content.get("example", "")
    text = example if isinstance(example, str) else json.dumps(example, indent=2)
    return f"<pre>{_text(text)}</pre>"


def _text(text: str) -> str:
    return html.escape(text)
