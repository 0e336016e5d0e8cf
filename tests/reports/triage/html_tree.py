"""An HTML page as a tree, and what is wrong with it: tags, nesting, ids, headings, scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

from msgspec import Struct, field

VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))
BLOCKS = frozenset(
    ("article", "aside", "details", "div", "dl", "footer", "form", "header", "main", "nav", "ol",
     "p", "section", "table", "ul", *(f"h{level}" for level in range(1, 7)))
)  # fmt: skip
"""Their start tags end an open paragraph: within one they would break the page's structure."""

CHILDREN = {
    "ul": {"li"},
    "ol": {"li"},
    "dl": {"dt", "dd"},
    "table": {"caption", "thead", "tbody"},
    "tr": {"th", "td"},
}
REFERENCES = ("aria-labelledby", "aria-describedby", "for")


class Node(Struct, dict=True):
    """An element with its attributes, children and all its text."""

    tag: str
    attributes: dict[str, str]
    parent: Node | None
    children: list[Node] = field(default_factory=list["Node"])
    own: list[str] = field(default_factory=list[str])

    def every(self, tag: str = "", *, css: str = "") -> Iterator[Node]:
        """All elements below with this tag and this class."""
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            if (not tag or child.tag == tag) and (not css or css in classes):
                yield child
            yield from child.every(tag, css=css)

    def one(self, tag: str = "", *, css: str = "") -> Node:
        """The first of them."""
        return next(self.every(tag, css=css))

    @property
    def text(self) -> str:
        """The text in it, with single blanks."""
        return " ".join("".join(self._text()).split())

    def _text(self) -> Iterator[str]:
        for part, child in zip(self.own, [*self.children, None], strict=True):
            yield part
            if child is not None:
                yield from child._text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {}, None, own=[""])
        self.at = self.root
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._begin(tag, attrs)
        if tag in VOID:
            self._end()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._begin(tag, attrs)
        self._end()

    def handle_endtag(self, tag: str) -> None:
        if tag != self.at.tag:
            self.problems.append(f"line {self.getpos()[0]}: </{tag}> ends <{self.at.tag}>")
        self._end()

    def handle_data(self, data: str) -> None:
        self.at.own[-1] += data

    def _begin(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            self.problems.append(f"line {self.getpos()[0]}: <{tag}> has an attribute twice")
        node = Node(tag, {name: value or "" for name, value in attrs}, self.at, own=[""])
        self.at.children.append(node)
        self.at.own.append("")
        self.at = node

    def _end(self) -> None:
        self.at = self.at.parent or self.root


def tree(html: str) -> Node:
    """The page; it must be well formed."""
    root, problems = read(html)
    assert not problems, problems
    return root


def read(html: str) -> tuple[Node, list[str]]:
    """The page and everything that is wrong with it."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    if reader.at is not reader.root:
        reader.problems.append(f"<{reader.at.tag}> is never ended")
    return reader.root, [*reader.problems, *_nesting(reader.root), *_ids(reader.root)]


def _nesting(root: Node) -> Iterator[str]:
    for node in root.every():
        above = node.parent.tag if node.parent else ""
        if node.tag in BLOCKS and above in ("p", "span", "h1", "h2", "h3", "h4", "h5"):
            yield f"<{node.tag}> in <{above}>"
        if above in CHILDREN and node.tag not in CHILDREN[above]:
            yield f"<{node.tag}> in <{above}>"
        if node.tag == "script" and "src" not in node.attributes:
            yield "a script in the page"
        for name in node.attributes:
            if name == "style" or name.startswith("on"):
                yield f"{name}= in the page"


def _ids(root: Node) -> Iterator[str]:
    seen = [node.attributes["id"] for node in root.every() if "id" in node.attributes]
    yield from (f"id {node_id} twice" for node_id in set(seen) if seen.count(node_id) > 1)
    yield from (
        f"id {node_id!r} is no word" for node_id in seen if not re.fullmatch(r"[\w-]+", node_id)
    )
    for node in root.every():
        for name in REFERENCES:
            for target_id in node.attributes.get(name, "").split():
                if target_id not in seen:
                    yield f"{name}={target_id} leads nowhere"
        link = node.attributes.get("href", "")
        if link.startswith("#") and link[1:] not in seen:
            yield f"href={link} leads nowhere"
