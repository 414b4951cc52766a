# SPDX-License-Identifier: Apache-2.0
"""Filler text that is on any machine: Python's standard library and its documentation strings.

The text is cut into pieces. A piece starts with whitespace and ends without, so encoding pieces one
by one and encoding their concatenation give the same tokens, and a needle fits between any two.
"""

import ast
import os
import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from sglang_sparse.tasks.words import Split, check_split

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_EXCLUDED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
    "idle_test",
}
_SENTENCE = re.compile(r"(?<=[.!?:;]) +")
_MAX_PIECE_CHARS = 240
_MAX_CODE_CHARS = 60_000


def _heldout(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0


def _prose_pieces(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        for number, sentence in enumerate(_SENTENCE.split(words)):
            if sentence and len(sentence) <= _MAX_PIECE_CHARS:
                yield ("\n" if number == 0 else " ") + sentence


def _code_pieces(source: str) -> Iterator[str]:
    for line in source[:_MAX_CODE_CHARS].split("\n")[:-1]:
        line = line.rstrip()
        if line and len(line) <= 120:
            yield "\n" + line


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield doc


def _files() -> Iterator[tuple[str, Path]]:
    root = Path(os.__file__).parent
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _EXCLUDED)
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


@lru_cache(maxsize=2)
def documents(split: Split) -> tuple[tuple[str, ...], ...]:
    """Documents of a split, each a tuple of pieces.

    A source file, or a topic of the language reference, belongs wholly to one split, by its name.

    Raises:
        ValueError: unknown split.
    """
    check_split(split)
    held = split != "train"
    result: list[tuple[str, ...]] = []
    for name, path in _files():
        if _heldout(name) != held or name == "pydoc_data/topics.py":
            continue
        try:
            source = path.read_bytes().decode("ascii")
        except UnicodeDecodeError:
            continue
        prose = tuple(p for doc in _docstrings(source) for p in _prose_pieces(doc))
        for pieces in (prose, tuple(_code_pieces(source))):
            if pieces:
                result.append(pieces)
    for name, text in _topics():
        if _heldout("topic:" + name) == held:
            pieces = tuple(p for p in _prose_pieces(text) if p.isascii())
            if pieces:
                result.append(pieces)
    return tuple(result)


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return sorted(topics.items())
