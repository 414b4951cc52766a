# SPDX-License-Identifier: Apache-2.0
"""The corpus: packages made here are read, cleaned, deduplicated and split, always alike."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest

from sglang_sparse.research import tokenizer
from sglang_sparse.research.corpus import build as building
from sglang_sparse.research.corpus import tokens
from sglang_sparse.research.corpus.archives import Source, find_archives, load_sources, members
from sglang_sparse.research.corpus.build import build, licences
from sglang_sparse.research.corpus.clean import Cleaner, is_english, to_ascii
from sglang_sparse.research.corpus.extract import (
    dict_text,
    html_text,
    paragraphs,
    plain_text,
    pod_text,
    wml_text,
)
from sglang_sparse.research.tokenizer import corpus_lines
from sglang_sparse.tasks import SPLITS, FileEncoder
from sglang_sparse.tasks.encoding import BOS

PROSE = "The {} of the house was seen by all who came to it in the year of the flood, number {}."


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/doc/x/link.html")
        link.type, link.linkname = tarfile.SYMTYPE, "a.html"
        archive.addfile(link)
    return buffer.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    """A Debian package: an ar archive whose members have even sizes."""
    parts = [b"!<arch>\n"]
    data = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",
        "data.tar.xz": lzma.compress(tar(files)),
    }
    for name, content in data.items():
        parts.append(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
        parts.append(content + b"\n" * (len(content) % 2))
    return b"".join(parts)


def source(
    package: str, archive: bytes, kind: str, *paths: str, skip: tuple[str, ...] = ()
) -> Source:
    digest = hashlib.sha256(archive).hexdigest()
    return Source(package, "1", digest, "GPL-2", kind, paths, skip)  # type: ignore[arg-type]


@pytest.fixture
def packages(tmp_path: Path) -> tuple[list[Source], Path]:
    """A Debian package of pages and a PyPI one of texts; two paragraphs are in both."""
    folder = tmp_path / "archives"
    folder.mkdir()
    same = "A paragraph that stands in the one package and in the other, word for word."
    pages = {
        f"./doc/en/{i}.html": f"<p>{same}</p><p>{PROSE.format('roof', i)}</p>".encode()
        for i in range(60)
    }
    pages["./doc/fr/0.html"] = b"<p>Le toit de la maison que tous ont vu cette annee</p>"
    texts = {
        f"x/{i}.txt": f"{same.upper()}\n\n{PROSE.format('door', i)}".encode() for i in range(60)
    }
    texts["x/z.txt.gz"] = gzip.compress(PROSE.format("cellar", 1).encode())
    first, second = deb(pages), gzip.compress(tar(texts), mtime=0)
    (folder / "pages_1_all.deb").write_bytes(first)
    (folder / "texts-1.tar.gz").write_bytes(second)
    return [
        source("pages", first, "html", "*.html", skip=("*/fr/*",)),
        source("texts", second, "text", "*.txt"),
    ], folder


def test_members_are_the_wanted_files_in_order(packages: tuple[list[Source], Path]) -> None:
    (pages, texts), folder = packages
    files = find_archives([pages, texts], folder)
    names = [name for name, _ in members(pages, files["pages"])]
    assert names == sorted(f"./doc/en/{i}.html" for i in range(60))
    found = dict(members(texts, files["texts"]))
    assert b"cellar" in found["x/z.txt"]


def test_missing_archives_are_named(packages: tuple[list[Source], Path]) -> None:
    (pages, _), folder = packages
    with pytest.raises(FileNotFoundError, match="pages 1"):
        find_archives([pages], folder / "nowhere")


def test_pages_lose_markup_navigation_and_scripts_and_keep_code() -> None:
    page = (
        "<html><head><title>T</title><script>var x;</script></head><body><nav>Next</nav>"
        "<p>One <b>bold</b>\n word &amp; more.</p><pre>a = 1\nb = 2</pre><ul><li>Item</ul></body>"
    )
    assert " ".join(html_text(page).split()) == "One bold word & more. a = 1 b = 2 Item"
    assert "a = 1\nb = 2" in html_text(page)
    assert "One bold word & more." in html_text(page)


def test_wrapped_prose_becomes_a_line_and_verse_stays() -> None:
    prose = "word " * 14
    assert plain_text(f"{prose}\n{prose}\nend.") == " ".join([prose.strip(), prose.strip(), "end."])
    assert plain_text("Double, double toil\nand trouble;\nFire burn").count("\n") == 2


def test_pod_dictionaries_and_campaigns_give_their_words() -> None:
    pod = "=head1 NAME\n\nUse C<< a->b >> and B<L<other|page>> E<lt>.\n\n=for html x\n\n=cut"
    assert pod_text(pod).split("\n\n")[:2] == ["NAME", "Use a->b and other <."]
    assert dict_text("00-database-info\n  about\nword\n  a {thing}") == "word\n  a thing"
    assert (
        wml_text('x=1\nmessage= _ "He said ""no"" to all"\ny= _"Go"') == 'He said "no" to all\n\nGo'
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (PROSE.format("roof", 1), True),
        ("The Roof", True),
        ("Das Dach des Hauses wurde von allen gesehen die in jenem Jahr zu uns kamen", False),
        ("0x3f 0x40 0x41 {} [] ;; 0x42 0x43 == 99 && 1234 || 0x44 +++ ---", False),
    ],
)
def test_english_is_told_from_other_text(text: str, kept: bool) -> None:
    assert is_english(text) is kept


def test_marks_become_ascii_and_foreign_scripts_go() -> None:
    assert to_ascii("\u201cna\u00efve\u201d \u2013 caf\u00e9\u2026") == '"naive" - cafe...'
    assert list(Cleaner().clean(["\u043c\u043e\u0441\u043a\u0432\u0430 " * 20])) == []


def test_a_paragraph_passes_once_and_a_heading_with_what_follows() -> None:
    cleaner, text = Cleaner(), PROSE.format("roof", 1)
    assert list(cleaner.clean(["Head", text, "Tail", "!" * 50, text.upper()])) == ["Head", text]
    assert list(cleaner.clean(["Head", text])) == []


def test_build_is_deterministic_and_its_splits_share_no_paragraph(
    packages: tuple[list[Source], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "DOCUMENT_BYTES", 600)
    monkeypatch.setattr(building, "LEAST_BYTES", 10)
    monkeypatch.setattr(building, "HELDOUT_EVERY", 4)
    sources, folder = packages
    rows = build(sources, folder, tmp_path / "a")
    assert build(sources, folder, tmp_path / "b") == rows
    parts = {}
    for split in ("train", "heldout"):
        content = (tmp_path / "a" / f"{split}.txt").read_bytes()
        assert content == (tmp_path / "b" / f"{split}.txt").read_bytes()
        texts = content.decode().split("\f")[:-1]
        own = [r for r in rows if r["split"] == split]
        assert [hashlib.sha256(t.encode()).hexdigest() for t in texts] == [r["sha256"] for r in own]
        parts[split] = {p for t in texts for p in t.split("\n\n")}
    assert parts["train"]
    assert parts["heldout"]
    assert not parts["train"] & parts["heldout"]
    together = parts["train"] | parts["heldout"]
    assert len(together) == 1 + 60 + 60 + 1
    listed = (tmp_path / "a" / "documents.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in listed] == rows
    assert "| pages | GPL-2 |" in licences(rows)


def test_the_list_of_packages_is_whole() -> None:
    sources = load_sources()
    assert len(sources) > 40
    assert len({s.package for s in sources}) == len(sources)
    for s in sources:
        assert len(s.sha256) == 64
        assert s.licence
        assert s.paths
        assert list(paragraphs(s.kind, b"")) == [""]
    assert not any("python3" in s.package for s in sources)  # its text is the tasks' filler


def test_a_token_file_holds_the_corpus(
    packages: tuple[list[Source], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "DOCUMENT_BYTES", 600)
    monkeypatch.setattr(building, "HELDOUT_EVERY", 4)
    sources, folder = packages
    build(sources, folder, tmp_path)
    lines = list(corpus_lines(tmp_path))[:8]
    tokenizer.save(tokenizer.build(lines, 400), tmp_path)
    encoder = FileEncoder(tmp_path)
    tokens.save(tokens.encode(tmp_path, encoder), tmp_path / "tokens.xz")
    loaded = tokens.load(tmp_path / "tokens.xz")
    sizes = tokens.token_sizes(encoder)
    for split in SPLITS:
        texts = (tmp_path / f"{split}.txt").read_text().split("\f")[:-1]
        found = loaded.documents(split, encoder.token_id(BOS))
        assert [encoder.decode(d.tolist()) for d in found] == texts
        assert [int(sizes[d].sum()) for d in found] == [len(t.encode()) for t in texts]
