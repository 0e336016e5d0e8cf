"""The report's page as Markdown, for a ticket or a mail. Pure."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.report import WeeklyReport

HIDDEN_TAGS = frozenset({"head", "svg", "figure", "nav"})
HIDDEN_CLASSES = frozenset(
    {"behind", "brand", "legend", "page-only", "paper-only", "skip", "swatch", "unseen"}
)
CONTAINERS = frozenset({"ul", "ol", "dl", "table", "thead", "tbody", "tr"})
BLOCKS = frozenset({"ul", "ol", "dl", "div", "section"})
UNCLOSED = frozenset({"br", "link", "meta"})
HEADINGS = {f"h{level}": "#" * level for level in range(1, 6)}
BOLD_CLASSES = frozenset({"badge", "headline", "name"})
NAME = re.compile(r"[\w.:/+-]+")
CELL, ROW, HEAD, CAPTION = "\ue000", "\ue001", "\ue002", "\ue003"
"""Ends of the parts of a table. The page has none of these, because they cannot be printed."""


def render_markdown(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The Markdown of the report's page: headings, paragraphs, lists and tables, without drawings,
    folded numbers and links within the page. All values are escaped."""
    converter = _Converter()
    converter.feed(render(report, docs_url=docs_url))
    lines = [" ".join(line.split()) for line in converter.text.splitlines()]
    text = "\n".join(re.sub(r" ([;,.])(?= |$)", r"\1", line) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


class _Converter(HTMLParser):
    """Turns each element into Markdown when it ends. Open elements have their tag, classes, link
    and the Markdown of what they contain."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, frozenset[str], str, list[str]]] = [("", frozenset(), "", [])]

    @property
    def text(self) -> str:
        """The Markdown so far."""
        return "".join(self._open[0][-1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element; `br` separates."""
        given = dict(attrs)
        if tag not in UNCLOSED:
            classes = frozenset((given.get("class") or "").split())
            self._open.append((tag, classes, given.get("href") or "", []))
        elif tag == "br":
            self._open[-1][-1].append("; ")

    def handle_data(self, data: str) -> None:
        """Add text, not the space between the parts of a list or table."""
        if data.isspace() and self._open[-1][0] in CONTAINERS:
            return
        self._open[-1][-1].append(escaped(re.sub(r"\s+", " ", data)))

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        if tag in UNCLOSED:
            return
        tag, classes, link, parts = self._open.pop()
        in_cell = any(other in ("td", "th") for other, *_ in self._open)
        if tag not in HIDDEN_TAGS and classes.isdisjoint(HIDDEN_CLASSES):
            self._open[-1][-1].append(_ended(tag, classes, link, "".join(parts), in_cell=in_cell))


def _ended(tag: str, classes: frozenset[str], link: str, inner: str, *, in_cell: bool) -> str:
    """An element as Markdown. In a cell of a table, everything is one line."""
    words = " ".join(inner.split(" ")).strip()
    if tag == "table":
        return _nested(inner) if in_cell else _table(inner)
    if ends := {"td": CELL, "th": CELL, "tr": ROW, "thead": HEAD, "caption": CAPTION}.get(tag):
        return words + ends
    if tag in ("strong", "b", "summary") or not classes.isdisjoint(BOLD_CLASSES):
        inner = words = f"**{words}**" if words else ""
    if tag == "code":
        return f"`{words}`" if NAME.fullmatch(words) else f"**{words}**"
    if tag == "a" and not link.startswith("#"):
        return f"[{words}]({link})"
    if "number" in classes and tag == "span":
        return f"{words}."
    if in_cell and tag in ("li", "p", "dd"):
        return f"{words}; " if tag == "li" else f"{words} "
    if tag in HEADINGS:
        return f"\n\n{HEADINGS[tag]} {words}\n\n"
    if tag in ("p", "summary"):
        return "\n\n" + re.sub(r"^(?=[#>+-])", r"\\", words) + "\n\n" if words else ""
    listed = {"li": f"- {words}\n", "dt": f"- {words}: ", "dd": f"{words}\n"}
    return listed.get(tag, f"\n\n{inner}\n\n" if tag in BLOCKS else inner)


def _rows(inner: str) -> tuple[str, list[str], list[list[str]]]:
    """The caption, the headings and the rows of a table."""
    caption, _, rest = inner.rpartition(CAPTION)
    head, _, body = rest.rpartition(HEAD)
    heads, *_ = _cells(head) or [list[str]()]
    return caption.strip(), heads, _cells(body)


def _cells(rows: str) -> list[list[str]]:
    return [
        [" ".join(cell.split()).strip("; ") for cell in row.split(CELL)[:-1]]
        for row in rows.split(ROW)[:-1]
    ]


def _table(inner: str) -> str:
    caption, heads, rows = _rows(inner)
    width = max(map(len, [heads, *rows]))
    filled = [(*row, *[""] * (width - len(row))) for row in rows]
    kept = [at for at in range(width) if any(row[at] for row in filled)]
    lines = [
        f"| {' | '.join(row[at] or '-' for at in kept)} |"
        for row in (heads or [""] * width, ["---"] * width, *filled)
    ]
    title = f"**{caption}**\n\n" if caption else ""
    return "\n\n" + title + "\n".join(lines) + "\n\n"


def _nested(inner: str) -> str:
    """A table within a cell, as text."""
    _, heads, rows = _rows(inner)
    return "; ".join(
        ", ".join(
            [row[0], *(f"{name} {cell}" for name, cell in zip(heads[1:], row[1:], strict=False))]
        )
        for row in rows
    )
