# SPDX-License-Identifier: Apache-2.0
"""How many facts a model reads, by relation and by what comes first in a sentence.

``python -m sglang_sparse.research.sentence_study --sentences heldout --out sentences.json``

Of sentences that it has seen, a model may know by heart which of the nouns is the value. So those
of training tell how much of it is learnt, and those held out how far that goes. Words and filler
are of the held-out split with both.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research.export import load
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks import sentences
from sglang_sparse.tasks.encoding import ASSISTANT, BOS, END, USER, FileEncoder
from sglang_sparse.tasks.entities import entities
from sglang_sparse.tasks.layout import ContextBuilder
from sglang_sparse.tasks.needles import depths
from sglang_sparse.tasks.relations import RELATIONS, noun, say
from sglang_sparse.tasks.sample import Needle

Sentences = Literal["training", "heldout"]
_LENGTH, _TOGETHER = 1024, 5
# What a person is, only longer chains ask for.
ASKED = tuple(name for name, relation in RELATIONS.items() if relation.value != "person")


@dataclass(frozen=True)
class Row:
    """Facts of one relation in a context, and a question about each with its right answer.

    Attributes:
        ids: token ids, at most 1,024.
        answers: of each fact the first and one past the last token of its answer.
    """

    ids: list[int]
    answers: tuple[tuple[int, int], ...]


def row(
    encoder: FileEncoder,
    builder: ContextBuilder,
    rng: np.random.Generator,
    name: str,
    templates: Sequence[str],
) -> Row:
    """Facts of the relation ``name``, told by ``templates`` and asked for plainly.

    Raises:
        DoesNotFit: the templates are too long for one row.
    """
    relation = RELATIONS[name]
    subjects = entities(rng, "heldout", relation.subject, len(templates))
    assert relation.value != "person"
    values = entities(rng, "heldout", relation.value, len(templates))
    needles: list[Needle] = []
    turns: list[tuple[list[int], list[int]]] = []
    for template, subject, value, depth in zip(
        templates, subjects, values, depths(rng, len(templates)), strict=True
    ):
        parts = noun(relation.subject, subject), noun(relation.value, value)
        needles.append(Needle(say(template, *parts), depth))
        lead = USER if turns else "\n\n"
        asked = encoder.encode(lead + say(relation.question, parts[0]) + END + ASSISTANT)
        turns.append((asked, encoder.encode(say(relation.plain, *parts) + END)))
    head = encoder.encode(BOS + USER)
    room = _LENGTH - len(head) - sum(len(a) + len(b) for a, b in turns)
    ids, answers = [*head, *builder.build(rng, needles, room).ids.tolist()], []
    for asked, answer in turns:
        ids += asked
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Row(ids, tuple(answers))


@torch.inference_mode()
def right(model: ReferenceModel, drawn: Row) -> list[bool]:
    """Whether each token of each answer is the most likely one behind those before it.

    The model computes in bf16 on a GPU and in fp32 elsewhere.
    """
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.tensor([drawn.ids], device=device)
    likely = model.logits(model(ids, dtype)[0]).argmax(-1)
    return [
        bool((likely[first - 1 : last - 1] == ids[0, first:last]).all())
        for first, last in drawn.answers
    ]


def study(
    model: ReferenceModel, encoder: FileEncoder, which: Sentences, count: int, seed: int
) -> list[dict[str, str | int]]:
    """Facts read of each relation, apart by whether the subject or the value is told first.

    Args:
        count: sentences of a relation, or all where there are fewer.
    """
    told = sentences.training() if which == "training" else sentences.heldout()
    rng, builder = np.random.default_rng(seed), ContextBuilder(encoder, "heldout")
    cells: list[dict[str, str | int]] = []
    for name in ASKED:
        drawn = rng.permutation(len(told[name]))[:count]
        found: dict[str, list[bool]] = {"subject": [], "value": []}
        for at in range(0, len(drawn), _TOGETHER):
            part = [told[name][i] for i in drawn[at : at + _TOGETHER]]
            made = row(encoder, builder, rng, name, part)
            for template, read in zip(part, right(model, made), strict=True):
                order = template.index("{s}") < template.index("{v}")
                found["subject" if order else "value"].append(read)
        cells += [
            {"relation": name, "first": first, "right": sum(reads), "of": len(reads)}
            for first, reads in found.items()
        ]
    return cells


def main() -> None:
    """Write the counts of one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=configs_dir() / "reference" / "model")
    parser.add_argument("--sentences", choices=["training", "heldout"], required=True)
    parser.add_argument("--count", type=int, default=100, help="sentences a relation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(args.model).to("cuda" if torch.cuda.is_available() else "cpu")
    cells = study(model, FileEncoder(args.model), args.sentences, args.count, args.seed)
    args.out.write_text(json.dumps({"sentences": args.sentences, "cells": cells}) + "\n")


if __name__ == "__main__":
    main()
