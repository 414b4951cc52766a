# SPDX-License-Identifier: Apache-2.0
"""Plain text out of a package's files: paragraphs, parted by empty lines."""

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser

from sglang_sparse.research.corpus.archives import TextKind

_BLOCK_TAGS = """address article aside blockquote body br caption dd div dl dt figcaption figure
footer form h1 h2 h3 h4 h5 h6 header hr html item li listing main note ol p page para pre section
simpara steps table tbody td th thead title tr ul variablelist varlistentry"""
_SILENT_TAGS = "button head info nav noscript script select style svg template"
_BLOCKS, _SILENT = frozenset(_BLOCK_TAGS.split()), frozenset(_SILENT_TAGS.split())
_WRAPPED_LINE = 50


class _Text(HTMLParser):
    """Collects the text of a page; blocks part paragraphs, and lines of code stay lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.silent: list[str] = []
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SILENT:
            self.silent.append(tag)
        self.verbatim += tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.silent:
            del self.silent[self.silent.index(tag) :]
        self.verbatim = max(self.verbatim - (tag == "pre"), 0)
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Text of an HTML, Mallard or DocBook page, without navigation, scripts and styles."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts)


def plain_text(text: str) -> str:
    """Text as it is, but wrapped lines of prose become one line; verse and tables keep theirs.

    A paragraph is wrapped prose if its lines but the last are long.
    """
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.expandtabs()):
        lines = [line.rstrip() for line in paragraph.strip("\n").split("\n")]
        body = [len(line.strip()) for line in lines[:-1]]
        if body and sum(body) / len(body) >= _WRAPPED_LINE:
            lines = [" ".join(line.strip() for line in lines)]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def pod_text(text: str) -> str:
    """Perl's documentation without its commands and formatting codes."""
    text = re.sub(r"^=(?:for|begin|cut|over|back|encoding|pod|end)\b.*$", "", text, flags=re.M)
    text = re.sub(r"^=(?:head\d|item)\s+", "", text, flags=re.M)
    text = text.replace("E<lt>", "\1").replace("E<gt>", "\2")
    # What C<< a->b >> holds keeps its angles, whatever codes are around it.
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", lambda m: _hide(m[1]), text, flags=re.S)
    code = re.compile(r"[A-Z]<([^<>]*)>")
    while code.search(text):
        text = code.sub(lambda m: m[1].split("|")[0], text)
    return plain_text(text.replace("\1", "<").replace("\2", ">"))


def _hide(text: str) -> str:
    return text.replace("<", "\1").replace(">", "\2")


def dict_text(text: str) -> str:
    """Articles of a dictd dictionary, without its header and the marks of cross references."""
    text = re.sub(r"^00-?database.*\n(?:\s+.*\n)*", "", text, flags=re.M)
    return plain_text(re.sub(r"[{}\\]", "", text))


def wml_text(text: str) -> str:
    """The translatable strings of a campaign, which tell its story."""
    strings = re.findall(r'_\s*"((?:[^"]|"")*)"', text)
    return "\n\n".join(s.replace('""', '"') for s in strings)


EXTRACTORS: dict[TextKind, Callable[[str], str]] = {
    "html": html_text,
    "text": plain_text,
    "pod": pod_text,
    "dict": dict_text,
    "wml": wml_text,
}


def decode(content: bytes) -> str:
    """UTF-8, or Latin-1 where it is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def paragraphs(kind: TextKind, content: bytes) -> Iterator[str]:
    """Paragraphs of a file of some kind, not yet cleaned."""
    yield from re.split(r"\n\s*\n", EXTRACTORS[kind](decode(content)))
