"""A shell script as commands and their words, as far as a command line needs it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SEPARATORS = "\n;|&()"
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")


def commands(text: str) -> list[list[str]]:
    """The words of each command in a script, comments left out; those of here-documents last.

    Quotes may run over lines; one that never closes (an apostrophe in prose) is a plain character.
    Nothing is expanded: `$VARIABLE` stays as it is written.
    """
    script, documents = _without_documents(re.sub(r"\\\r?\n", " ", text))
    found = list(_commands(script))
    for document in documents:
        found += _commands(document)
    return found


def _without_documents(text: str) -> tuple[str, list[str]]:
    script: list[str] = []
    documents: list[str] = []
    end: str | None = None
    body: list[str] = []
    for line in text.splitlines():
        if end is not None:
            if line.strip() == end:
                documents.append("\n".join(body))
                end, body = None, []
            else:
                body.append(line)
            continue
        script.append(line)
        opened = None if line.lstrip().startswith("#") else _HEREDOC.search(line)
        end = None if opened is None else opened[2]
    return "\n".join(script), [*documents, "\n".join(body)]


def _commands(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    word: list[str] | None = None
    at = 0
    # Where a kind of quote closes for the last time: an opened one beyond it never does.
    last = {quote: text.rfind(quote) for quote in "'\""}
    while at < len(text):
        char = text[at]
        at += 1
        if char in "'\"" and at <= last[char]:
            quoted, at = _quoted(text, at, char)
            word = [*(word or ()), quoted]
        elif char == "\\" and at < len(text):
            word = [*(word or ()), text[at]]
            at += 1
        elif char.isspace() or char in _SEPARATORS or (char == "#" and word is None):
            if word is not None:
                words.append("".join(word))
                word = None
            if char == "#":
                at = _line_end(text, at)
            elif char in _SEPARATORS and words:
                yield words
                words = []
        else:
            start = at - 1
            while at < len(text) and not text[at].isspace() and text[at] not in "'\"\\\n;|&()":
                at += 1
            word = [*(word or ()), text[start:at]]
    if word is not None:
        words.append("".join(word))
    if words:
        yield words


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _quoted(text: str, at: int, quote: str) -> tuple[str, int]:
    """What stands in quotes that opened before `at`, and where the text goes on."""
    if quote == "'":
        end = text.find(quote, at)
        return text[at:end], end + 1
    found = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL).match(text, at)
    if found is None:
        return '"', at
    return re.sub(r'\\(["\\$`])', r"\1", found[1]), found.end()
