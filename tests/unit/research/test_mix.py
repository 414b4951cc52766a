# SPDX-License-Identifier: Apache-2.0
"""Rows of several reading tasks, and the weights of their answers."""

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sparse.research.mix import _NAME, TRAIN_TASKS, RowMaker
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.ranks import Ranks
from sglang_sparse.research.step import Stepper, flat_gradients
from sglang_sparse.tasks import READING_TASKS, TASKS, FileEncoder, Problem
from sglang_sparse.tasks.corpus import documents
from sglang_sparse.tasks.encoding import BOS

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
TITLES = ("Mr", "Mrs", "Ms", "Dr", "Miss", "Aunt", "Uncle", "Captain")


@pytest.fixture(scope="module")
def rows() -> RowMaker:
    encoder = FileEncoder(MODEL)
    bos = encoder.token_id(BOS)
    parts = [[bos, *encoder.encode("".join(d))] for d in documents("train")[:60]]
    text = np.array([i for part in parts for i in part], dtype=np.uint16)
    return RowMaker(encoder, text, text_rows=0.0)


@pytest.fixture
def made(rows: RowMaker, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """All reading problems that rows are made of, those that are left out, too."""
    reading, problems = rows._reading, []

    def record(rng: np.random.Generator, name: str, length: int) -> Problem:
        problems.append(reading(rng, name, length))
        return problems[-1]

    monkeypatch.setattr(rows, "_reading", record)
    return problems


@pytest.mark.parametrize(("length", "most"), [(512, 2), (4096, 16), (8192, 16)])
def test_answers_weigh_more_where_a_row_asks_seldom(rows: RowMaker, length: int, most: int) -> None:
    batch = rows.batch(seed=5, batch=60, length=length)
    weights = defaultdict(set)
    for kinds, spans in zip(batch.kinds, batch.spans, strict=True):
        assert ((kinds >= 2) == (spans > 0)).all()
        (weight,) = set(kinds[spans > 0] - 1)  # one for the whole row
        weights[len(set(spans[spans > 0]))].add(int(weight))
    assert weights[1] == {most}
    often = [count for count in weights if count > length // 512]
    assert often
    assert all(weights[count] == {1} for count in often)
    in_order = [weights[count] for count in sorted(weights)]
    assert all(min(a) >= max(b) for a, b in pairwise(in_order))


def test_the_answer_loss_is_the_mean_by_weight() -> None:
    model = ReferenceModel(ModelConfig(64, 16, 24, layers=1, heads=2, kv_heads=1, head_dim=8))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)  # so that losses differ
    ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
    kinds = torch.tensor([[1, 0, 1, 2, 2, 0], [0, 1, 17, 17, 17, 0]])
    logits = model.logits(model(ids))[:, :-1]
    losses = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    a, b = losses
    answer = (a[3] + a[4] + 16 * (b[2] + b[3] + b[4])) / (2 + 3 * 16)
    text = (a[0] + a[2] + b[1]) / 3
    assert abs(answer - (a[3] + a[4] + b[2] + b[3] + b[4]) / 5) > 0.1
    expected = torch.autograd.grad(answer + 0.25 * text, list(model.parameters()))
    norm = torch.stack([g.norm() for g in expected]).norm()

    stepper = Stepper(model, flat_gradients(model), Ranks(), 2, 6, text_weight=0.25)
    stepper.load(ids, kinds, None, None)
    stepper.step()
    torch.testing.assert_close(stepper.stats[:2], torch.stack((answer, text)).detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient / norm.clamp_min(1), rtol=1e-4, atol=1e-5
        )
    assert stepper.halves[:, 1].sum() == 5  # accuracy has no weights


def test_long_rows_hold_several_reading_tasks_or_one_alone(
    rows: RowMaker, made: list[Problem]
) -> None:
    rng = np.random.default_rng(6)
    held: dict[int, list[int]] = {1024: [], 16384: []}
    for length, counts in held.items():
        for _ in range(360):
            made.clear()
            questions = set(rows._problem(rng, length).questions)
            counts.append(sum(questions.issuperset(problem.questions) for problem in made))
    assert max(held[1024]) == 1
    assert sum(count > 3 for count in held[16384]) > 36
    assert sum(count == 1 for count in held[16384]) > 36


@pytest.mark.parametrize("task", ["collect", "joined"])
def test_long_rows_have_more_answers_of_a_task_than_one_problem(rows: RowMaker, task: str) -> None:
    rng, asked = np.random.default_rng(6), []
    for _ in range(80):
        _, spans = rows.row(rng, 16384, rows.builder)
        asked.append(sum(TRAIN_TASKS[number] == task for _, _, number in spans))
    problems = [TASKS[task](np.random.default_rng(seed), "wide", 16384) for seed in range(30)]
    most = max(len(problem.questions) for problem in problems)
    assert sum(count > most for count in asked) > 4


def test_no_two_reading_problems_of_a_row_name_the_same_person_or_town(
    rows: RowMaker, made: list[Problem]
) -> None:
    def named(problem: Problem) -> set[str]:
        words = re.findall(r"[A-Z]\w+", " ".join(q.answer for q in problem.questions))
        return set(words) - {"The", "Most", *TITLES}

    rng, left_out, pairs = np.random.default_rng(7), 0, 0
    for _ in range(120):
        made.clear()
        questions = set(rows._problem(rng, 16384).questions)
        held = [named(p) for p in made if questions.issuperset(p.questions)]
        names = [name for own in held for name in own]
        assert len(names) == len(set(names))
        left_out += len(made) > len(held)
        pairs += sum(map(bool, held)) > 1
    assert left_out
    assert pairs > 20


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Most votes for the kite went to Mostar.", ["Mostar"]),
        ("The kite is in the mill.", []),
        ("The mayor of Thebes is Theo Drake.", ["Thebes", "Theo", "Drake"]),
        ("1. Mona Mrozek was in the zoo. 2. Mona Mrozek was in the mill.", ["Mona", "Mrozek"] * 2),
        ("Missy Auntley lives in Captainville.", ["Missy", "Auntley", "Captainville"]),
        *((f"{title} Holt owns the kite.", ["Holt"]) for title in ("Mr.", "Dr.", "Aunt")),
        *((f"{title} Holt was in the zoo.", ["Holt"]) for title in ("Mrs.", "Ms.", "Miss")),
        *((f"{title} Holt keeps a llama.", ["Holt"]) for title in ("Uncle", "Captain")),
    ],
)
def test_names_of_answers_are_found_without_titles(answer: str, found: list[str]) -> None:
    assert _NAME.findall(answer) == found


@pytest.mark.parametrize("task", READING_TASKS)
def test_only_people_towns_and_rivers_are_names(task: str) -> None:
    for seed in range(20):
        for question in TASKS[task](np.random.default_rng(seed), "train", 1024).questions:
            capitals = re.findall(r"[A-Z]\w*", question.answer)
            assert [w for w in capitals if w not in ("The", "Most")] == _NAME.findall(
                question.answer
            )
