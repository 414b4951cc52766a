# SPDX-License-Identifier: Apache-2.0
"""The reference model's data, training step, checkpoint and export, at a tiny scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sparse.research.export import MAX_BYTES, export, load
from sglang_sparse.research.mix import TRAIN_TASKS, RowMaker
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.spread import assignment, find_sources
from sglang_sparse.research.symbols import SymbolTask, symbol_batch
from sglang_sparse.research.train import Trainer, parser
from sglang_sparse.tasks import FileEncoder

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
TINY = ModelConfig(2048, 32, 48, layers=2, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def encoder() -> FileEncoder:
    return FileEncoder(MODEL)


@pytest.fixture(scope="module")
def rows(encoder: FileEncoder) -> RowMaker:
    return RowMaker(encoder)


def test_symbol_rows_repeat_and_needles_are_asked_for() -> None:
    task = SymbolTask()
    batch = symbol_batch(task, 8, 96, torch.Generator().manual_seed(1), torch.device("cpu"))
    for row, kinds in zip(batch.ids[:4], batch.kinds[:4], strict=True):
        learnt = (kinds == 2).nonzero().flatten()
        period = int(learnt[0]) + 1
        assert torch.equal(row[period:], row[:-period])
    for row, kinds in zip(batch.ids[4:], batch.kinds[4:], strict=True):
        for at in (kinds == 2).nonzero().flatten().view(-1, task.value_length):
            start = int(at[0]) - task.key_length - 1
            asked = row[start : start + task.slot - 1]
            windows = row[:start].unfold(0, task.slot - 1, 1)
            assert (windows == asked).all(1).any()


def test_training_rows_answer_from_their_own_context(encoder: FileEncoder, rows: RowMaker) -> None:
    batch = rows.batch(seed=3, batch=6, length=512)
    assert batch.ids.shape == (6, 512)
    assert len(batch.tasks) == batch.spans.max()
    for number, task in enumerate(batch.tasks, 1):
        row, columns = np.nonzero(batch.spans == number)
        answer = encoder.decode(batch.ids[row[0], columns + 1])
        if TRAIN_TASKS[task] in ("single_key", "multi_key", "passkey"):
            assert answer in encoder.decode(batch.ids[row[0], : columns[0]])


def test_text_is_learnt_in_the_asked_share_of_rows(encoder: FileEncoder, rows: RowMaker) -> None:
    quiet = RowMaker(encoder, rows.builder, text_share=0.0)
    kinds = quiet.batch(seed=3, batch=4, length=512).kinds
    assert (kinds != 1).all()
    assert (kinds == 2).any()


def test_sources_are_where_the_digit_was_first_said(encoder: FileEncoder, rows: RowMaker) -> None:
    batch = rows.batch(seed=4, batch=4, length=1024)
    ids = torch.from_numpy(batch.ids.astype(np.int64))
    kinds = torch.from_numpy(batch.kinds.astype(np.int64))
    digit_of = torch.full((2048,), -1)
    for digit in range(10):
        digit_of[encoder.token_id(str(digit))] = digit
    query, source, slot, usable = find_sources(ids, kinds, digit_of, 16)
    assert usable.float().mean() > 0.3
    assert (source < query)[usable].all()
    assert torch.equal(ids.gather(1, source)[usable], ids.gather(1, query + 1)[usable])
    assert (slot[usable] < 10).all()


def test_each_digit_has_one_head_and_nine_heads_serve() -> None:
    table = assignment(6, 4)
    assert table.any(-1).sum() == 9
    assert (table.flatten(0, 1).sum(0)[2:] == 1).all()


def train(out: Path, *arguments: str) -> Trainer:
    tiny = "--hidden-size 32 --intermediate-size 48 --layers 2 --heads 2 --kv-heads 1 --head-dim 16"
    small = f"--out {out} --tokenizer {MODEL} --text-tokens 512 --log-every 5 {tiny}"
    trainer = Trainer(parser().parse_args([*small.split(), *arguments]))
    trainer.run()
    return trainer


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_training_resumes_from_its_checkpoint_and_exports(tmp_path: Path) -> None:
    first = train(tmp_path, "--max-steps", "10", "--seed", "5")
    again = train(tmp_path, "--max-steps", "30", "--seed", "5", "--resume")
    assert (first.state.step, again.state.step) == (10, 30)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    exported = load(tmp_path / "export")
    expected = again.model.model.embed_tokens.weight.detach().bfloat16().float()
    assert torch.equal(exported.model.embed_tokens.weight.detach(), expected)


def test_chats_train_with_the_spreading_loss(tmp_path: Path) -> None:
    train(tmp_path, "--max-steps", "4", "--log-every", "2", "--first-stage", "7", "--spread", "0.5")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["spread"]) for line in lines if "text" in line)


def test_same_seed_trains_the_same_model(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, "--max-steps", "5", "--seed", "9") for name in "ab"]
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_models_over_the_size_limit_are_not_exported(tmp_path: Path, encoder: FileEncoder) -> None:
    big = ReferenceModel(ModelConfig(hidden_size=512, layers=6, intermediate_size=1024))
    with pytest.raises(ValueError, match=f"{MAX_BYTES} allowed"):
        export(big, tmp_path, encoder)
