# SPDX-License-Identifier: Apache-2.0
"""Facts read in sentences: rows hold them, and a count is of answers that are right whole."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sparse.research import sentence_study
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.sentence_study import ASKED, Row, right, row, study
from sglang_sparse.tasks import sentences
from sglang_sparse.tasks.encoding import FileEncoder
from sglang_sparse.tasks.layout import ContextBuilder

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"


@pytest.fixture(scope="module")
def encoder() -> FileEncoder:
    return FileEncoder(MODEL)


class Told(ReferenceModel):
    """Finds each successor likely but those of some positions."""

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        super().__init__(ModelConfig(2048, 32, 48, layers=1, heads=2, kv_heads=1, head_dim=16))
        self.wrong = list(wrong)

    def forward(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.roll(ids, -1, dims=1), 2048).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden[self.wrong] = hidden[self.wrong].roll(1, dims=-1)
        return hidden


def test_a_row_tells_and_asks_for_each_fact(encoder: FileEncoder) -> None:
    templates = ("{v} is what {s} has.", "{s} bought {v}.", "{s}: {v}!")
    builder = ContextBuilder(encoder, "heldout")
    drawn = row(encoder, builder, np.random.default_rng(3), "owns", templates)
    assert 900 < len(drawn.ids) <= 1024
    text = encoder.decode(drawn.ids)
    for (first, last), template in zip(drawn.answers, templates, strict=True):
        answer = encoder.decode(drawn.ids[first:last]).removesuffix("<|end|>")
        subject, value = answer.removesuffix(".").split(" owns ")
        told = template.format(s=subject, v=value)
        assert told[:1].upper() + told[1:] in text
        assert text.index(f"What does {subject} own?") < text.index(answer)


def test_an_answer_is_right_when_all_its_tokens_are(encoder: FileEncoder) -> None:
    drawn = Row(list(range(100, 160)), ((20, 24), (30, 35), (50, 60)))
    assert right(Told(), drawn) == [True, True, True]
    # What follows position 33 is token 34, the last one of the second answer.
    assert right(Told([33, 24, 48]), drawn) == [True, False, True]


def test_counts_are_by_relation_and_order(encoder: FileEncoder) -> None:
    cells = study(Told(), encoder, "heldout", 12, 4)
    assert [cell["relation"] for cell in cells[::2]] == list(ASKED)
    for subject, value in zip(cells[::2], cells[1::2], strict=True):
        assert (subject["first"], value["first"]) == ("subject", "value")
        assert int(subject["of"]) + int(value["of"]) == 12
        assert subject["right"] == subject["of"]
        assert value["right"] == value["of"]


@pytest.mark.parametrize("which", ["training", "heldout"])
def test_main_reads_the_sentences_that_are_named(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    found = sentence_study.row

    def noted(
        encoder: FileEncoder,
        builder: ContextBuilder,
        rng: np.random.Generator,
        name: str,
        templates: Sequence[str],
    ) -> Row:
        asked.extend(templates)
        return found(encoder, builder, rng, name, templates)

    monkeypatch.setattr(sentence_study, "row", noted)
    monkeypatch.setattr(sentence_study, "load", lambda _: Told())
    out = tmp_path / "sentences.json"
    monkeypatch.setattr(
        sys, "argv",
        ["study", "--model", str(MODEL), "--sentences", which, "--count", "3", "--out", str(out)],
    )  # fmt: skip
    sentence_study.main()
    told = getattr(sentences, which)()
    assert set(asked) <= {line for name in ASKED for line in told[name]}
    result = json.loads(out.read_text())
    assert result["sentences"] == which
    assert sum(cell["of"] for cell in result["cells"]) == 3 * len(ASKED) == len(asked)
