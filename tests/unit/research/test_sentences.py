# SPDX-License-Identifier: Apache-2.0
"""Plain sentences: the files hold templates that a fact can be told in."""

import re
import sys
from pathlib import Path

import pytest

from sglang_sparse.research import pack_sentences
from sglang_sparse.tasks import sentences
from sglang_sparse.tasks.relations import RELATIONS

NAMES = {*RELATIONS, "visits", "votes"}


@pytest.mark.parametrize(("part", "fewest"), [("training", 700), ("heldout", 30)])
def test_each_relation_has_templates_with_its_holes_once(part: str, fewest: int) -> None:
    found = getattr(sentences, part)()
    assert set(found) == NAMES
    for name, lines in found.items():
        assert len(set(lines)) == len(lines) >= fewest
        holes = sorted("spv" if name == "votes" else "sv")
        for line in lines:
            assert sorted(re.findall(r"\{(\w)\}", line)) == holes
            assert line.isascii()
            if part == "heldout":
                assert line[-1] in ".!"
            assert line.rstrip("\"')")[-1] in ".!?"
            assert "{v} of " not in line


def test_no_held_out_sentence_has_the_words_of_one_of_training() -> None:
    def words(line: str) -> tuple[str, ...]:
        return tuple(re.findall(r"[a-z]+", line.lower()))

    training = {words(line) for lines in sentences.training().values() for line in lines}
    held = [words(line) for lines in sentences.heldout().values() for line in lines]
    assert not training & set(held)


def test_packed_sentences_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owns.txt").write_text("{s} has {v}.\n{v} is of {s}.\n")
    (tmp_path / "code.txt").write_text("{s}: {v}.\n")
    out = tmp_path / "out.xz"
    monkeypatch.setattr(sys, "argv", ["pack_sentences", str(tmp_path), "--out", str(out)])
    pack_sentences.main()
    assert out.read_bytes() == pack_sentences.pack(tmp_path)
    text = pack_sentences.bz2.decompress(out.read_bytes()).decode()
    assert sentences.parse(text) == {
        "code": ("{s}: {v}.",), "owns": ("{s} has {v}.", "{v} is of {s}."),
    }  # fmt: skip
    with pytest.raises(ValueError, match="no name above"):
        sentences.parse("{s} has {v}.")
