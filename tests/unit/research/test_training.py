# SPDX-License-Identifier: Apache-2.0
"""The reference model's data, training step, checkpoint and export, at a tiny scale."""

import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sglang_sparse.research import ranks
from sglang_sparse.research.cloze import Cloze
from sglang_sparse.research.corpus import tokens
from sglang_sparse.research.cost import estimate, operations
from sglang_sparse.research.export import MAX_BYTES, export, load
from sglang_sparse.research.filler import TokenPieces
from sglang_sparse.research.mix import TRAIN_TASKS, RowMaker, general_fact
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.symbols import SymbolTask, symbol_batch
from sglang_sparse.research.train import Trainer, parser
from sglang_sparse.tasks import READING_TASKS, TASKS, FileEncoder
from sglang_sparse.tasks.corpus import documents
from sglang_sparse.tasks.encoding import ASSISTANT, BOS, END

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
TINY = ModelConfig(2048, 32, 48, layers=2, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def encoder() -> FileEncoder:
    return FileEncoder(MODEL)


@pytest.fixture(scope="module")
def text(encoder: FileEncoder) -> NDArray[np.uint16]:
    """A small corpus: documents of Python's standard library stand in for one."""
    bos = encoder.token_id(BOS)
    parts = [[bos, *encoder.encode("".join(d))] for d in documents("train")[:60]]
    return np.array([i for part in parts for i in part], dtype=np.uint16)


@pytest.fixture(scope="module")
def corpus(text: NDArray[np.uint16], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tokens.xz"
    tokens.save(tokens.Corpus(text, text[:2000]), path)
    return path


@pytest.fixture(scope="module")
def rows(encoder: FileEncoder, text: NDArray[np.uint16]) -> RowMaker:
    return RowMaker(encoder, text, text_rows=0.0)


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


def test_rows_of_text_are_stretches_of_the_corpus(
    rows: RowMaker, text: NDArray[np.uint16], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "text_rows", 1.0)
    batch = rows.batch(seed=3, batch=4, length=512)
    assert (batch.kinds[:, :-1] == 1).all()
    assert not len(batch.tasks)
    for row in batch.ids:
        assert row[0] == rows.encoder.token_id(BOS)
        windows = np.lib.stride_tricks.sliding_window_view(text, 511)
        assert (windows == row[1:]).all(1).any()


def test_the_tasks_own_filler_is_not_learnt(rows: RowMaker) -> None:
    kinds = rows.batch(seed=3, batch=24, length=512).kinds
    learnt = (kinds == 1).any(1)
    assert 0 < learnt.sum() < 24
    assert (kinds >= 2).any(1).all()


@pytest.mark.parametrize("length", [256, 512, 1024, 4096])
def test_chats_fit_and_every_answer_is_marked(
    encoder: FileEncoder, rows: RowMaker, length: int
) -> None:
    rng, seen = np.random.default_rng(7), set()
    for number in range(60):
        builder = (rows.builder, rows.own)[number % 2]
        ids, spans = rows.row(rng, length, builder)
        assert len(ids) <= length
        starts = [i + 1 for i, token in enumerate(ids) if token == encoder.token_id(ASSISTANT)]
        ends = [ids.index(encoder.token_id(END), start) + 1 for start in starts]
        assert sorted((a, b) for a, b, _ in spans) == list(zip(starts, ends, strict=True))
        seen |= {TRAIN_TASKS[task] for _, _, task in spans}
    assert len(seen) > 10


def test_questions_of_one_form_are_also_asked_with_words_around_them(
    encoder: FileEncoder, rows: RowMaker
) -> None:
    rng, asked = np.random.default_rng(3), []
    for _ in range(80):
        ids, spans = rows.row(rng, 1024, rows.own)
        marker = encoder.token_id(ASSISTANT)
        for first, last, task in spans:
            if TRAIN_TASKS[task] in ("single_key", "multi_key", "passkey", "fact"):
                question = encoder.decode(ids[max(first - 60, 0) : first]).split("\n")[-1]
                assert ids[first - 1] == marker
                asked.append((question, encoder.decode(ids[first:last])))
    plain = [q for q, _ in asked if "What is the" in q]
    assert 0 < len(plain) < len(asked)
    assert any("Please tell me: " in q or "Question: " in q for q, _ in asked)
    assert all(answer.startswith("The ") for _, answer in asked)


def test_pieces_of_the_corpus_begin_with_whitespace_and_are_all_of_it(
    encoder: FileEncoder, text: NDArray[np.uint16]
) -> None:
    pieces = TokenPieces(encoder, text)
    assert len(pieces) > 100
    assert "".join(pieces.texts[:]) == encoder.decode(text.tolist())
    inner = pieces.texts[1:]
    assert all(p[0] in " \n" for p in inner)
    assert pieces.fitting(3, 50) > 3


def train(out: Path, corpus: Path, *arguments: str) -> Trainer:
    tiny = "--hidden-size 32 --intermediate-size 48 --layers 2 --heads 2 --kv-heads 1 --head-dim 16"
    small = f"--out {out} --tokenizer {MODEL} --corpus {corpus} --text-tokens 512 --log-every 5"
    trainer = Trainer(parser().parse_args([*small.split(), *tiny.split(), *arguments]))
    trainer.run()
    return trainer


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_training_resumes_from_its_checkpoint_and_exports(tmp_path: Path, corpus: Path) -> None:
    long = ["--seed", "5", "--lr", "0.1", "--time-limit", "1e9"]
    long += ["--keep-exports"]
    first = train(tmp_path, corpus, "--max-steps", "10", *long)
    again = train(tmp_path, corpus, "--max-steps", "30", *long, "--resume")
    assert (first.state.step, again.state.step) == (10, 30)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    exported = load(tmp_path / "export")
    expected = again.model.model.embed_tokens.weight.detach().bfloat16().float()
    assert torch.equal(exported.model.embed_tokens.weight.detach(), expected)
    assert FileEncoder(tmp_path / "export").vocab_size == 2048
    earlier, last = sorted((tmp_path / "exports").iterdir())
    assert (earlier.name, last.name) == ("000010", "000030")
    weights = [(f / "model.safetensors").read_bytes() for f in (earlier, last, tmp_path / "export")]
    assert weights[0] != weights[1] == weights[2]


def test_a_training_that_is_over_ends_with_the_mean_of_its_last_models(
    tmp_path: Path, corpus: Path
) -> None:
    flags = ["--lr", "0.1", "--first-stage", "7", "--log-every", "1"]
    flags += ["--save-every", "0", "--mean", "2"]
    train(tmp_path, corpus, *flags, "--max-steps", "3")
    assert not (tmp_path / "mean").exists()
    train(tmp_path, corpus, *flags, "--max-steps", "5", "--time-limit", "1e-9", "--resume")
    last = [load(f).state_dict() for f in sorted((tmp_path / "exports").iterdir())[-2:]]
    mean = load(tmp_path / "mean").state_dict()
    assert not torch.equal(*(state["model.embed_tokens.weight"] for state in last))
    for name, found in mean.items():
        right = sum(state[name] for state in last) / 2
        # Stored in bf16: 8 bits of mantissa, rounded to nearest.
        torch.testing.assert_close(found, right, rtol=2**-8, atol=1e-7)
    assert FileEncoder(tmp_path / "mean").vocab_size == 2048


def test_training_goes_on_from_an_export_where_the_checkpoint_is_lost(
    tmp_path: Path, corpus: Path
) -> None:
    first = train(tmp_path, corpus, "--max-steps", "10", "--seed", "5")
    (tmp_path / "checkpoint.pt").unlink()
    kept = load(tmp_path / "export").state_dict()
    again = train(tmp_path, corpus, "--max-steps", "10", "--seed", "5", "--resume")
    assert again.state.step == again.state.warm_from == 10
    assert again.elapsed >= first.state.seconds > 0
    assert all(torch.equal(v, kept[k]) for k, v in again.model.state_dict().items())


def test_the_rate_warms_up_and_falls_over_the_last_share_of_the_time(
    tmp_path: Path, corpus: Path
) -> None:
    trainer = train(tmp_path, corpus, "--max-steps", "0", "--time-limit", "1000", "--lr", "1.0")
    rates = []
    for step, seconds in ((0, 0.0), (500, 100.0), (500, 600.0), (500, 800.0), (500, 1000.0)):
        trainer.state.step, trainer.base_seconds = step, seconds
        trainer.started = time.monotonic()
        rates.append(round(trainer.rate(), 3))
    assert rates == [0.005, 1.0, 1.0, 0.515, 0.03]


def test_a_process_stops_when_asked_and_stages_end_with_their_time(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = train(tmp_path, corpus, "--stop-after", "0")
    assert ended.state.step == 0
    seconds = itertools.count(step=0.1)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    flags = "--time-limit 3 --text-tokens 2048 --log-every 1"
    short = train(tmp_path, corpus, *flags.split())
    assert short.state.stage > 3
    assert short.state.seconds >= 3


def test_chats_train_with_a_finite_loss(tmp_path: Path, corpus: Path) -> None:
    flags = "--max-steps 4 --log-every 2 --first-stage 7"
    train(tmp_path, corpus, *flags.split())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    chats = [line for line in lines if "text" in line]
    assert chats
    assert all(np.isfinite((line["answer_loss"], line["text_loss"])).all() for line in chats)


def test_same_seed_trains_the_same_model(tmp_path: Path, corpus: Path) -> None:
    runs = [train(tmp_path / name, corpus, "--max-steps", "5", "--seed", "9") for name in "ab"]
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_recipe_fills_the_12_mib_that_are_allowed() -> None:
    args = parser().parse_args(["--tokenizer", "t", "--corpus", "c"])
    config = ModelConfig(4096, layers=args.layers, intermediate_size=args.intermediate_size)
    size = 2 * sum(p.numel() for p in ReferenceModel(config).parameters())
    assert 0.97 * MAX_BYTES < size <= MAX_BYTES


def test_the_cost_is_that_of_products_and_causal_attention() -> None:
    config = ModelConfig(4096, layers=8, intermediate_size=336)
    short, long = (operations(config, 6_000_000, n) for n in (0, 4096))
    assert short == 6 * 6_000_000
    # Scores and outputs: 2 products of 2 operations over half of the positions; backward 2.5 times.
    assert long - short == 3.5 * (2 * 2 * 4096 / 2) * 8 * 64 * 8
    stages = estimate(config, 1000.0, 65536)
    assert [length for length, _, _ in stages[:-1]] == [256, 512, 1024, 2048, 4096, 8192]
    assert sum(tokens for _, tokens, _ in stages) <= 920 * 1.3e6


def test_models_over_the_size_limit_are_not_exported(tmp_path: Path) -> None:
    big = ReferenceModel(ModelConfig(hidden_size=512, layers=6, intermediate_size=1024))
    with pytest.raises(ValueError, match=f"{MAX_BYTES} allowed"):
        export(big, tmp_path, MODEL)


def test_facts_are_told_in_sentences_of_the_corpus_and_answered_as_before(rows: RowMaker) -> None:
    rng = np.random.default_rng(8)
    told, shared = set(), 0
    for _ in range(40):
        problem = rows._reading(rng, "sentences", 1024)
        for needle in problem.needles:
            assert needle.parts is not None
            low = needle.text.lower()
            assert all(part.lower() in low for part in needle.parts)
            carrier = low.replace(needle.parts[0].lower(), "").replace(needle.parts[1].lower(), "")
            shared += carrier in told
            told.add(carrier)
        stated = {needle.parts for needle in problem.needles}
        for question in problem.questions:  # the value is beside the subject that is asked for
            assert any(
                part[0].lower() in question.answer.lower() and question.values[0] in part[1]
                for part in stated
            )
    # Half of the facts or so have a sentence of their own.
    assert len(told) > shared


def test_a_fact_is_told_in_several_ways_and_answered_in_one() -> None:
    told, owners = set(), set()
    for seed in range(200):
        problem = general_fact(np.random.default_rng(seed), "train", 1024)
        for needle, question in zip(problem.needles, problem.questions, strict=True):
            match = re.fullmatch(r"The (.+) is (\S+(?: \S+)?)\.", question.answer)
            assert match
            assert match[2].lower() in needle.text.lower()
            assert match[1].rsplit(" of ", 1)[0] in needle.text
            told.add(needle.text.replace(match[1], "S").replace(match[2], "V").lower())
            owners.add(match[1].rsplit(" of ", 1)[-1])
    assert len(told) >= 5
    assert any(owner.startswith("Dr. ") for owner in owners)


def test_a_cloze_holds_both_phrases_in_a_sentence_of_the_text() -> None:
    texts = ["\nA.", " The cat, that slept, saw a very old house by the sea;", " one two three"]
    rng, seen = np.random.default_rng(3), set()
    for _ in range(300):
        text = Cloze(texts).sentence(rng, "Cecil Haas", "the orchard")
        assert text[0].isupper()
        assert text[-1] == "."
        assert text.lower().count("cecil haas") == text.lower().count("the orchard") == 1
        assert not re.search(r"\b(a|an|the) the\b", text.lower())
        seen.add(text.lower().index("cecil haas") < text.lower().index("the orchard"))
    assert seen == {True, False}
    votes = {Cloze(texts).sentence(rng, "the kite", "Cecil Haas", "Velagate") for _ in range(300)}
    assert all(text.count(name) == 1 for text in votes for name in ("Cecil Haas", "Velagate"))
    assert all(text.lower().count("the kite") == 1 for text in votes)
    of = Cloze(["The door of the house of a man"])
    told = {of.sentence(rng, "Cecil Haas", "Velagate") for _ in range(200)}
    assert not any("Velagate of" in text for text in told)
    assert any("Haas of" in text for text in told)
    fitting = Cloze(texts, lambda text: "house" in text)
    assert all(re.search("old|sea", fitting.sentence(rng, "Cecil Haas")) for _ in range(50))
    with pytest.raises(ValueError, match="no sentences"):
        Cloze(texts[:1]).sentence(rng, "Cecil Haas", "the orchard")
    with pytest.raises(ValueError, match="no sentences"):
        Cloze(texts, lambda text: False).sentence(rng, "Cecil Haas", "the orchard")


def test_a_cloze_asks_about_its_phrase_behind_words_of_a_question_and_of_the_text() -> None:
    texts = [" The cat, that slept, saw a very old house by the sea;", " one two three"]
    rng = np.random.default_rng(4)
    asked = [Cloze(texts).question(rng, "Cecil Haas") for _ in range(300)]
    assert all(text.count("Cecil Haas") == 1 for text in asked)
    assert {text[-1] for text in asked} == {"?", "."}
    assert any(text.startswith("Which the Cecil Haas") for text in asked)
    assert any(text.startswith("Tell me the ") for text in asked)
    assert any(text.startswith("The ") for text in asked)


@pytest.mark.parametrize("task", READING_TASKS)
def test_only_facts_that_any_sentence_can_state_name_their_parts(task: str) -> None:
    for seed in range(30):
        problem = TASKS[task](np.random.default_rng(seed), "train", 2048)
        named = [needle for needle in problem.needles if needle.parts is not None]
        for needle in named:
            assert needle.parts is not None
            assert all(part.lower() in needle.text.lower() for part in needle.parts)
        for question in problem.questions:
            assert (question.parts is not None) == (
                task in ("forms", "collect", "tally", "dialogue")
            )
            parts = question.parts or ()
            assert all(part.lower() in question.prompt.lower() for part in parts)
        if task in ("sentences", "collect", "tally"):
            assert len(named) == len(problem.needles)
        if task in ("similar_keys", "forms"):
            assert not named
        if task == "joined":
            # A person and a town of one sentence may be a home or an office.
            said = " ".join(question.answer for question in problem.questions)
            if "lives in" in said and "mayor of" in said:
                assert all(needle.parts and needle.parts[1][:2] == "a " for needle in named)
            else:
                assert len(named) == len(problem.needles)
