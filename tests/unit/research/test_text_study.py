# SPDX-License-Identifier: Apache-2.0
"""Baselines and bits a byte on small texts, beside values computed another way."""

import gzip
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sglang_sparse.research.baselines import NGramModel, gzip_bits, ngram_bits
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.text_study import SCORED, TextStudy, table

VOCAB = 7


def kneser_ney(train: list[int], order: int, vocab: int):  # type: ignore[no-untyped-def]
    """Chen and Goodman's recursion, written out: p(token, context)."""
    grams = Counter(tuple(train[i : i + order]) for i in range(len(train) - order + 1))
    tables = {order: grams}
    for size in range(order - 1, 0, -1):
        tables[size] = Counter(gram[1:] for gram in tables[size + 1])
    discounts = {}
    for size, table_ in tables.items():
        ones, twos = (sum(c == n for c in table_.values()) for n in (1, 2))
        discounts[size] = ones / (ones + 2 * twos) if ones and twos else 0.5

    def p(token: int, context: tuple[int, ...]) -> float:
        size = len(context) + 1
        lower = p(token, context[1:]) if context else 1 / vocab
        followers = {g[-1]: c for g, c in tables[size].items() if g[:-1] == context}
        total = sum(followers.values())
        if not total:
            return lower
        d = discounts[size]
        return max(followers.get(token, 0) - d, 0) / total + d * len(followers) / total * lower

    return p


@pytest.fixture(scope="module")
def text() -> list[int]:
    rng = np.random.default_rng(3)
    ids = [0]
    for _ in range(400):  # each token mostly follows from the one before
        ids.append(
            (3 * ids[-1] + 1) % VOCAB if rng.random() < 0.7 else int(rng.integers(VOCAB - 1))
        )
    return ids


@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_5_gram_model_is_kneser_ney(text: list[int], order: int) -> None:
    model = NGramModel(np.array(text[:300]), VOCAB, order)
    held = np.array(text[300:])
    expected = kneser_ney(text[:300], order, VOCAB)
    found = model.probabilities(held)
    for i, probability in enumerate(found):
        context = tuple(int(t) for t in held[i : i + order - 1])
        assert probability == pytest.approx(expected(int(held[i + order - 1]), context), rel=1e-9)


def test_probabilities_of_all_tokens_add_up_to_one(text: list[int]) -> None:
    model = NGramModel(np.array(text[:300]), VOCAB)
    for context in ([0, 1, 4, 6], [6, 6, 6, 6]):
        total = sum(model.probabilities(np.array([*context, t]))[0] for t in range(VOCAB))
        assert total == pytest.approx(1.0, rel=1e-9)


def test_bits_count_bytes_and_leave_markers_out(text: list[int]) -> None:
    train, held = np.array(text[:300]), np.array(text[300:])
    sizes = np.array([0, 1, 2, 3, 4, 5, 6])
    probabilities = NGramModel(train, VOCAB).probabilities(held)
    scored = held[4:]
    bits = sum(-math.log2(p) for p, t in zip(probabilities, scored, strict=True) if t)
    assert ngram_bits(train, held, sizes) == pytest.approx(bits / sizes[scored].sum(), rel=1e-9)


def test_vocabularies_too_large_for_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match="63 bits"):
        NGramModel(np.zeros(10, dtype=np.int64), 8192)


def test_gzip_bits_are_those_of_each_text_alone() -> None:
    texts = ["to be or not to be " * 9, "that is the question"]
    packed = sum(len(gzip.compress(t.encode(), 9, mtime=0)) for t in texts)
    assert gzip_bits(texts) == 8 * packed / sum(map(len, texts))


def test_model_bits_are_cross_entropy_over_bytes_and_use_the_context() -> None:
    model = ReferenceModel(ModelConfig(64, 32, 48, layers=2, heads=2, kv_heads=1, head_dim=16), 3)
    sizes = np.arange(64)
    study = TextStudy(model, 1, sizes)
    rng = np.random.default_rng(5)
    document = rng.integers(2, 64, 1100).astype(np.uint16)
    parts, losses = defaultdict(list), 0.0
    for start in range(0, 1100, 299):
        part = document[start : start + 299].astype(np.int64)
        row = torch.tensor([[1, *part]])
        logits = model.logits(model(row))[0, :-1]
        losses += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        parts["bytes"].append(sizes[part].sum())
    expected = losses / math.log(2) / sum(parts["bytes"])
    assert study.whole([document], window=300) == pytest.approx(expected, rel=1e-5)
    found = study.by_context([document], (512, 1024), stride=50)
    assert set(found) == {512, 1024}
    place = document[:1024]
    loss, size = study.nats(place[-1023:], SCORED)
    again, same = study.nats(place[-511:], SCORED)
    assert size == same == sizes[place[-SCORED:]].sum()
    assert loss != again
    with pytest.raises(ValueError, match="no document has 2048"):
        study.by_context([document], (2048,))
    result = {"baselines": {"gzip -9": 2.0}, "whole": 1.0, "by_context": {"512": 1.5}}
    assert "| gzip -9 | 2.0000 | 4.0000 |" in table(result)
