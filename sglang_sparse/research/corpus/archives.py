# SPDX-License-Identifier: Apache-2.0
"""The packages of a corpus: which, where they lie, and their files."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

SOURCES = Path(__file__).with_name("sources.json")
_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60
TextKind = Literal["html", "text", "pod", "dict", "wml"]


@dataclass(frozen=True)
class Source:
    """One package.

    Attributes:
        package, version: names in Debian's or PyPI's archive.
        sha256: of the ``.deb`` or ``.tar.gz`` file.
        licence: of the text, for the card.
        kind: how text is taken out of its files.
        paths, skip: shell patterns of the files to read, and of those among them to leave.
    """

    package: str
    version: str
    sha256: str
    licence: str
    kind: TextKind
    paths: tuple[str, ...]
    skip: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """Whether the file ``name`` of the package is read; a ``.gz`` at its end is ignored."""
        name = name.removesuffix(".gz")
        return any(fnmatchcase(name, p) for p in self.paths) and not any(
            fnmatchcase(name, p) for p in self.skip
        )


def load_sources(path: Path = SOURCES) -> list[Source]:
    """The packages that ``path`` lists."""
    rows = json.loads(path.read_text())
    return [
        Source(**row | {"paths": tuple(row["paths"]), "skip": tuple(row["skip"])}) for row in rows
    ]


def find_archives(sources: list[Source], folder: Path) -> dict[str, Path]:
    """The archive of each package, by checksum, wherever it lies under ``folder``.

    Raises:
        FileNotFoundError: some are missing; the message names package and version of each.
    """
    files = sorted(p for p in folder.rglob("*") if p.name.endswith((".deb", ".tar.gz")))
    sums = {hashlib.sha256(p.read_bytes()).hexdigest(): p for p in files}
    missing = [f"{s.package} {s.version}" for s in sources if s.sha256 not in sums]
    if missing:
        raise FileNotFoundError(f"no archive with the listed checksum for: {', '.join(missing)}")
    return {s.package: sums[s.sha256] for s in sources}


def members(source: Source, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files that ``source`` wants, sorted by name; links are left out."""
    with archive.open("rb") as file:
        opened = _data_of_deb(file) if archive.suffix == ".deb" else file
        with tarfile.open(fileobj=opened, mode="r:*") as tar:
            found = [
                (m.name, tar.extractfile(m).read())  # type: ignore[union-attr]
                for m in tar
                if m.isfile() and source.wants(m.name)
            ]
    for name, content in sorted(found):
        packed = name.endswith((".gz", ".dz"))
        yield name.removesuffix(".gz"), gzip.decompress(content) if packed else content


def _data_of_deb(file: BinaryIO) -> BinaryIO:
    """The ``data.tar`` of a Debian package, which is an ``ar`` archive of three files."""
    if file.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise ValueError("not a Debian package")
    while header := file.read(_AR_HEADER):
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        content = file.read(size + size % 2)[:size]
        if name.startswith("data.tar"):
            return io.BytesIO(lzma.decompress(content) if name.endswith(".xz") else content)
    raise ValueError("the Debian package holds no data.tar")
