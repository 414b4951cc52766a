# SPDX-License-Identifier: Apache-2.0
"""Decoding a token at a time over a cascading cache: the paper's algorithm, and the study of it."""

import gzip
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sparse.config import configs_dir
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.cascade_decode import (
    Arm,
    DecodeStudy,
    TokenwiseDecoder,
    arms,
    insert,
    summary,
)
from sglang_sparse.research.export import load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.tasks import FileEncoder
from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape
from sglang_sparse_kernels.cascade.sequential import SequentialCascade, Token

SMALL = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=32
)
AVERAGE = AttentionAverage(0.99)
IDS = torch.randint(64, (120,), generator=torch.Generator().manual_seed(3)).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_each_token_is_inserted_as_the_paper_says(
    levels: int, size: int, sinks: int, distinct: int, seed: int
) -> None:
    stride = 1 << (levels - 1)
    shape = CascadeShape(size * levels * stride, sinks, levels, stride)
    generator = torch.Generator().manual_seed(seed)
    cache, none = SequentialCascade(shape), torch.zeros(0)
    for i in range(shape.full):
        cache.insert(Token(i, none, none))
    positions = torch.arange(shape.rows).expand(1, 1, 1, shape.rows).clone()
    for new in range(shape.full, shape.full + 3 * shape.window):
        # Few distinct scores, hence many ties.
        scores = torch.randint(distinct, positions.shape, generator=generator).float()
        positions[..., shape.full] = new
        token = Token(new, none, none)
        for held, score in zip([*cache.tokens(), token], scores[0, 0, 0].tolist(), strict=False):
            held.score = score
        cache.insert(token)
        insert((positions, scores), scores, shape, shape.full, new - shape.sinks)
        want = [held.position for held in cache.tokens()]
        assert positions[0, 0, 0, : shape.full].tolist() == want


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(SMALL, seed=1).eval()


def test_requests_side_by_side_are_decoded_as_alone(model: ReferenceModel) -> None:
    shape = CascadeShape(32, 4, 2, 16)
    prompts = [IDS[:70], IDS[10:63], IDS[5:75]]

    def decoded(prompts: list[list[int]], slots: int) -> torch.Tensor:
        decoder = TokenwiseDecoder(model, shape, AVERAGE, slots=slots)
        decoder.feed_all(prompts)
        decoder.settle(len(prompts))
        return torch.stack([decoder.step([token] * len(prompts)) for token in IDS[80:115]], 1)

    together = decoded(prompts, 4)
    for one, prompt in zip(together, prompts, strict=True):
        torch.testing.assert_close(one, decoded([prompt], 1)[0])
    with pytest.raises(ValueError, match="at least 36 tokens"):
        decoded([IDS[:35]], 1)


def test_open_strides_are_inserted_before_decoding(model: ReferenceModel) -> None:
    shape = CascadeShape(32, 4, 2, 16)
    prompt = IDS[: shape.full + 2 * shape.stride + 13]
    decoder = TokenwiseDecoder(model, shape, AVERAGE)
    decoder.feed(prompt)
    keys, scores = decoder.state.k.clone()[:, 0], decoder.state.scores.clone()[:, 0]
    decoder.settle(1)
    for layer in range(SMALL.layers):
        for head in range(SMALL.kv_heads):
            rows = zip(keys[layer, head], scores[layer, head].tolist(), strict=True)
            held = [Token(i, key, key, score) for i, (key, score) in enumerate(rows)]
            cache = SequentialCascade(shape, len(prompt) - 13, held[: shape.sinks])
            window = held[shape.sinks : shape.full]
            cache.levels = [window[shape.level :], window[: shape.level]]
            for token in held[shape.full : shape.full + 13]:
                cache.insert(token)
            got = decoder.state.k[layer, 0, head, : shape.full]
            assert torch.equal(got, torch.stack([token.key for token in cache.tokens()]))


def test_the_first_token_after_a_closed_stride_is_the_same_either_way(
    model: ReferenceModel,
) -> None:
    shape = CascadeShape(32, 4, 2, 16)
    strides, tokenwise = (
        kind(model, shape, AVERAGE) for kind in (CascadeDecoder, TokenwiseDecoder)
    )
    prompt = IDS[: shape.full + 2 * shape.stride]
    for decoder in (strides, tokenwise):
        decoder.feed(prompt)
    tokenwise.settle(1)
    new = [tokenwise.step([token])[0] for token in IDS[90:95]]
    want = strides.feed(IDS[90:95])
    torch.testing.assert_close(new[0], want[0])
    assert not torch.allclose(new[-1], want[-1])


def test_the_study_decodes_what_it_is_given() -> None:
    folder = configs_dir() / "reference" / "model"
    study = DecodeStudy(
        load(folder), FileEncoder(folder), sinks=16, levels=4, average=AVERAGE, batch=2, decoded=24
    )
    chosen = arms(64, 16)
    assert [arm.held(16) for arm in chosen] == [88.5, 81, 89]
    for arm in chosen:
        study.loss(arm, 300, 3)
    strides = study.rows[0]
    assert [row["count"] for row in study.rows] == [3, 3, 3]
    assert "more" not in strides
    assert study.rows[1]["more"] == pytest.approx(study.rows[1]["mean"] - strides["mean"])
    # By strides, what is decoded is what a prompt would be.
    (ids, *_) = study.suite.heldout_text(300, 3)
    shape = CascadeShape(64, 16, 4, 16)
    with torch.no_grad():
        states = CascadeDecoder(study.model, shape, AVERAGE).feed(ids)[-25:-1]
        want = torch.nn.functional.cross_entropy(
            study.model.logits(states), torch.tensor(ids[-24:])
        )
    assert strides["of_each"][0] == pytest.approx(float(want), rel=1e-4)
    samples = [study.suite.sample("passkey", 400, 1, i, 0.2) for i in range(3)]
    # What holds everything finds every key; greedy replies are those of the decoder.
    whole = Arm("strides", 512, 64)
    found = study.digits(whole, samples, 400)
    decoder = CascadeDecoder(study.model, CascadeShape(512, 16, 4, 64), AVERAGE)
    with torch.no_grad():
        reply = study.decode(whole, [samples[0].prompt_ids], 6)[1][0]
    assert reply == decoder.reply(samples[0].prompt_ids, 6)
    assert found["mean"] > 0.9
    table = summary(study.rows)
    assert "loss of text of 300 tokens (more)" in table
    assert f"| {chosen[2].name} | " in table


def test_the_committed_table_is_that_of_the_committed_rows() -> None:
    report = configs_dir() / "reference" / "cascade-report"
    rows = json.loads(gzip.decompress((report / "decode.json.gz").read_bytes()))["rows"]
    assert summary(rows) in (report / "README.md").read_text()
