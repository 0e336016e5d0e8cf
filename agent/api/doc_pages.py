"""`/docs/causes/<id>`, `/docs/rules/<id>` and `/docs/glossary`: the pages that ship with kneewatch.

I/O edge: pages are read from the package. They hold no script and nothing from elsewhere.
"""

from __future__ import annotations

import html
import re
from importlib.resources import files

from kneewatch.agent.api.docs_page import framed

FOLDERS = ("causes", "rules")
GLOSSARY = "glossary"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
LINK = re.compile(r'(<a href="[^":#]*?)\.md(#[^"]*)?"')


def source(folder: str, name: str) -> str | None:
    """The Markdown of a page; None where there is no such page. The glossary is in no folder."""
    if not NAME.fullmatch(name) or folder not in (*FOLDERS, ""):
        return None
    # Only the package itself has code: its folders of pages are no packages of their own.
    page = files("kneewatch.docs").joinpath(*([folder] if folder else []), f"{name}.md")
    return COMMENT.sub("", page.read_text("utf-8")) if page.is_file() else None


def rendered(markdown: str, *, up: str) -> str:
    """A page as HTML. `up` leads from the page to /docs/, relative: "../" or nothing."""
    from markdown_it import (
        MarkdownIt,  # here, so that a daemon that nobody asks does not pay for it
    )

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    # Pages link to each other as files of the repository; here they have no ending.
    body = LINK.sub(r'\1\2"', body)
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    links = (
        f'<p><a href="{up}../triage">Triage page</a> · <a href="{up}causes/index">Causes</a> · '
        f'<a href="{up}rules/index">Rules</a> · <a href="{up}{GLOSSARY}">Glossary</a></p>'
    )
    return framed(title, f"{up}reference.css", f"{links}\n{body}")
