"""The report as Markdown, for a ticket or a mail. It is made from the HTML page. Pure.

Headings, paragraphs, lists and tables of the page become Markdown. Drawings, folded parts (the
numbers behind a drawing) and navigation are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html.parser import HTMLParser

from msgspec import Struct, field

from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.report import WeeklyReport

NAME = re.compile(r"[\w.:/+-]+")
VOID = frozenset({"br", "meta", "link", "input"})
LEFT_OUT = frozenset({"head", "svg", "figure", "nav"})
LEFT_OUT_CLASSES = frozenset({"unseen", "skip", "brand", "swatch", "page-only"})
HEADINGS = ("h1", "h2", "h3", "h4", "h5")
GROUPS = ("html", "body", "header", "main", "footer", "section", "article", "div")
BOLD_CLASSES = frozenset({"headline", "name"})


class Node(Struct):
    """An element of the HTML page. `children` are its texts and elements, in order."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    children: list[Node | str] = field(default_factory=list["Node | str"])

    @property
    def classes(self) -> frozenset[str]:
        """The element's CSS classes."""
        return frozenset(self.attributes.get("class", "").split())

    @property
    def is_left_out(self) -> bool:
        """Whether the element does not appear in the Markdown."""
        return self.tag in LEFT_OUT or not self.classes.isdisjoint(LEFT_OUT_CLASSES)

    def elements(self, *tags: str) -> Iterator[Node]:
        """The direct child elements with one of these tags."""
        return (node for node in self.children if isinstance(node, Node) and node.tag in tags)


class _Tree(HTMLParser):
    """Parses an HTML page into a tree of nodes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("html")
        self._open = [self.root]
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Node(tag))

    def handle_endtag(self, tag: str) -> None:
        if self._open[-1].tag == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def render_markdown(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The report as Markdown. All values are escaped. With `docs_url`, incidents link to the pages
    of their causes."""
    tree = _Tree(render(report, docs_url=docs_url, plots=False))
    return "\n\n".join("\n".join(block) for block in _blocks(tree.root)) + "\n"


def _blocks(node: Node) -> Iterator[list[str]]:
    """Yields the lines of each heading, paragraph, list and table in an element. Empty ones are
    left out."""
    for child in node.children:
        if isinstance(child, str) or child.tag == "details":
            continue
        if "strip" in child.classes:
            yield [_inline(next(child.elements("svg")), only="desc")]
        elif child.is_left_out:
            continue
        elif child.tag in GROUPS:
            yield from _blocks(child)
        elif child.tag == "table":
            yield from _table(child)
        elif child.tag in ("ul", "ol"):
            if lines := bullets(_inline(item) for item in child.elements("li")):
                yield lines
        elif child.tag == "dl":
            yield bullets(_definitions(child))
        elif line := _inline(child):
            yield [f"{_prefix(child)}{_bold(child, line)}"]


def _prefix(node: Node) -> str:
    """The prefix of the line of a heading or a notice. Empty for other paragraphs."""
    if node.tag in HEADINGS:
        return "#" * (HEADINGS.index(node.tag) + 1) + " "
    return "> " if "notice" in node.classes else ""


def _definitions(node: Node) -> Iterator[str]:
    name = ""
    for item in node.elements("dt", "dd"):
        if item.tag == "dt":
            name = _inline(item)
        else:
            yield f"{name}: {_inline(item)}"


def bullets(lines: Iterable[str]) -> list[str]:
    """A bulleted list of those lines that are not empty."""
    return [f"- {line}" for line in lines if line]


def _table(table: Node) -> Iterator[list[str]]:
    """Yields the lines of a table and its caption. A table without headings becomes a list."""
    for caption in table.elements("caption"):
        if not caption.is_left_out:
            yield [f"**{_inline(caption)}**"]
    heads, body = _cells(table)
    if heads:
        yield rows(heads, body)
    else:
        yield bullets(": ".join(cells) for cells in body)


def _cells(table: Node) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of a table. Columns that are empty in all rows are left out. A row
    with a single wide cell is a note on the row before it."""
    heads: list[str] = []
    body: list[list[str]] = []
    notes: dict[int, str] = {}
    for group in table.elements("thead", "tbody"):
        for row in group.elements("tr"):
            cells = list(row.elements("th", "td"))
            if group.tag == "thead":
                heads = [_inline(cell) for cell in cells]
            elif len(cells) == 1 and "colspan" in cells[0].attributes and body:
                notes[len(body) - 1] = _inline(cells[0])
            else:
                body.append([_inline(cell) for cell in cells])
    if notes and heads:
        heads.append("Note")
        body = [[*cells, notes.get(at, "")] for at, cells in enumerate(body)]
    width = max(map(len, body), default=0)
    body = [[*cells, *[""] * (width - len(cells))] for cells in body]
    kept = [at for at in range(width) if any(cells[at] for cells in body)]
    return (
        [heads[at] for at in kept] if heads else [],
        [[cells[at] for at in kept] for cells in body],
    )


def rows(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; empty if there are no rows. Cells are Markdown in which "|" is escaped."""
    lines = [f"| {' | '.join(cell or '-' for cell in cells)} |" for cells in body]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines] if lines else []


def _inline(node: Node, *, only: str = "") -> str:
    """The content of an element as one line. With `only`: the content of the child elements with
    this tag."""
    words = "".join(map(_piece, node.elements(only) if only else node.children))
    return re.sub(r" ([;,.])", r"\1", " ".join(words.split())).strip("; ")


def _piece(child: Node | str) -> str:
    if isinstance(child, str):
        return escaped(re.sub(r"\s+", " ", child))
    if child.is_left_out:
        return ""
    inside = _inline(child)
    if child.tag == "br":
        return "; "
    if child.tag == "code":
        return _code(child, inside)
    if child.tag == "table":
        return _flat(child)
    if child.tag in ("ul", "ol"):
        return f" {'; '.join(map(_inline, child.elements('li')))}. "
    if child.tag == "a":
        page = child.attributes.get("href", "")
        return inside if page.startswith("#") else f"[{inside}]({page})"
    if "badge" in child.classes:
        # A badge without words shows its state by its icon.
        state = next((name[4:] for name in child.classes if name.startswith("ink-")), "")
        return f"**{inside or state}** "
    if "number" in child.classes:
        return f"{inside}."
    if child.tag in ("p", "div", "details"):
        return f" {inside} "
    return _spaced(child, _bold(child, inside))


def _bold(node: Node, inside: str) -> str:
    is_bold = node.tag == "strong" or not node.classes.isdisjoint(BOLD_CLASSES)
    return f"**{inside}**" if inside and is_bold else inside


def _code(node: Node, inside: str) -> str:
    """A name as code. A changed flag is bold instead, because a backtick in it would end the
    code."""
    (only, *others) = node.children or ("",)
    if others or not isinstance(only, str):
        return inside
    return f"`{only}`" if NAME.fullmatch(only) else f"**{inside}**"


def _spaced(node: Node, inside: str) -> str:
    """The content, with a space at each end at which the element has white space. Otherwise words
    would be joined."""
    first, last = (node.children[0], node.children[-1]) if node.children else ("", "")
    before = " " if isinstance(first, str) and first[:1].isspace() else ""
    return f"{before}{inside}{' ' if isinstance(last, str) and last[-1:].isspace() else ''}"


def _flat(table: Node) -> str:
    """A table inside a cell, as text: the values of each row with their headings."""
    heads, body = _cells(table)
    return " " + "; ".join(
        ", ".join(
            [cells[0], *(f"{head} {cell}" for head, cell in zip(heads[1:], cells[1:], strict=True))]
        )
        for cells in body
    )
