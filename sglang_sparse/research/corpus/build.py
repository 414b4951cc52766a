# SPDX-License-Identifier: Apache-2.0
"""Builds the corpus: ``python -m sglang_sparse.research.corpus.build --help``.

Writes ``train.txt`` and ``heldout.txt``, whose documents end with a form feed, and
``documents.jsonl``: name, package, licence, split, bytes and checksum of each. The same archives
give the same bytes.
"""

import argparse
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_sparse.research.corpus.archives import Source, find_archives, load_sources, members
from sglang_sparse.research.corpus.clean import Cleaner
from sglang_sparse.research.corpus.extract import paragraphs
from sglang_sparse.tasks.words import Split

DOCUMENT_END = "\f"
# 32K tokens of context want about 110 KB; a longer text is cut, shorter neighbours go together.
DOCUMENT_BYTES = 128 * 1024
LEAST_BYTES = 512
HELDOUT_EVERY = 40


@dataclass(frozen=True)
class Document:
    """A stretch of a package's text: part of a file, a file, or neighbouring short files."""

    name: str
    package: str
    licence: str
    text: str

    @property
    def split(self) -> Split:
        """Held out if the checksum of the name says so."""
        return "heldout" if zlib.crc32(self.name.encode()) % HELDOUT_EVERY == 0 else "train"

    def row(self) -> dict[str, object]:
        """What ``documents.jsonl`` says of it."""
        content = self.text.encode()
        about = {k: v for k, v in asdict(self).items() if k != "text"}
        digest = hashlib.sha256(content).hexdigest()
        return {**about, "split": self.split, "bytes": len(content), "sha256": digest}


def documents(source: Source, archive: Path, cleaner: Cleaner) -> Iterator[Document]:
    """Documents of one package, in the order of its file names."""
    kept: list[str] = []
    size = number = 0
    for _, content in members(source, archive):
        for paragraph in cleaner.clean(paragraphs(source.kind, content)):
            kept.append(paragraph)
            size += len(paragraph) + 2
            if size >= DOCUMENT_BYTES:
                yield _document(source, number, kept)
                kept, size, number = [], 0, number + 1
    if size >= LEAST_BYTES:
        yield _document(source, number, kept)


def _document(source: Source, number: int, kept: list[str]) -> Document:
    name = f"{source.package}/{number:04d}"
    return Document(name, source.package, source.licence, "\n\n".join(kept))


def build(sources: list[Source], archives: Path, out: Path) -> list[dict[str, object]]:
    """Write the corpus of ``sources`` into ``out``; returns the rows of ``documents.jsonl``.

    Raises:
        FileNotFoundError: archives are missing.
    """
    files = find_archives(sources, archives)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    cleaner = Cleaner()
    with (out / "train.txt").open("w") as train, (out / "heldout.txt").open("w") as heldout:
        for source in sources:
            for document in documents(source, files[source.package], cleaner):
                (train if document.split == "train" else heldout).write(
                    document.text + DOCUMENT_END
                )
                rows.append(document.row())
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "documents.jsonl").write_text(lines)
    return rows


def licences(rows: list[dict[str, object]]) -> str:
    """A Markdown table of packages, licences and bytes, for the model's card."""
    size: Counter[tuple[str, str]] = Counter()
    for row in rows:
        size[str(row["package"]), str(row["licence"])] += int(str(row["bytes"]))
    lines = ["| package | licence | text, KB |", "| --- | --- | ---: |"]
    lines += [
        f"| {package} | {licence} | {n / 1e3:,.0f} |" for (package, licence), n in size.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build the corpus of ``sources.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archives", type=Path, required=True, help="folder with the packages")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = build(load_sources(), args.archives, args.out)
    (args.out / "licences.md").write_text(licences(rows))
    for split in ("train", "heldout"):
        own = [int(str(r["bytes"])) for r in rows if r["split"] == split]
        print(f"{split}: {len(own)} documents, {sum(own) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
