# SPDX-License-Identifier: Apache-2.0
"""The study of cascading caches: its decoder against the model alone, and what it scores."""

import gzip
import json
from itertools import pairwise

import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.cascade_study import (
    ARMS,
    Arm,
    CascadeStudy,
    digits_right,
    interval,
    repeated,
    summary,
)
from sglang_sparse.research.export import load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.tasks import FileEncoder
from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape

SMALL = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=32
)
SHAPE, AVERAGE = CascadeShape(32, 4, 2, 16), AttentionAverage(0.99)
IDS = torch.randint(64, (120,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(SMALL, seed=1).eval()


@torch.no_grad()
def test_up_to_what_is_held_the_model_attends_to_everything(model: ReferenceModel) -> None:
    ids = IDS[: SHAPE.rows]
    dense = model(torch.tensor([ids]))[0]
    torch.testing.assert_close(CascadeDecoder(model, SHAPE, AVERAGE).feed(ids), dense)
    longer = model(torch.tensor([IDS]))[0]
    assert not torch.allclose(CascadeDecoder(model, SHAPE, AVERAGE).feed(IDS)[-1], longer[-1])


def test_replies_stop_before_the_end_token(model: ReferenceModel) -> None:
    prompts = [IDS, IDS[:70], IDS[3:52]]
    decoder = CascadeDecoder(model, SHAPE, AVERAGE, slots=3)
    whole = decoder.replies(prompts, 6)
    ends = {token for one in whole for token in one}
    for end in ends:
        cut = [one[: one.index(end)] if end in one else one for one in whole]
        assert decoder.replies(prompts, 6, end) == cut
        steps = max(min(len(one) + 1, 6) for one in cut)
        assert decoder.lengths == [len(prompt) + steps - 1 for prompt in prompts]
    assert len(ends) > 1


@pytest.mark.parametrize("scored", [True, False])
def test_what_was_fed_before_does_not_matter_nor_how(model: ReferenceModel, scored: bool) -> None:
    decoder = CascadeDecoder(model, SHAPE, AVERAGE, scored=scored)
    whole = decoder.feed(IDS)
    decoder.reset()
    cuts = [0, 1, 50, 53, 69, 120]
    parts = [decoder.feed(IDS[a:b]) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert decoder.lengths == [len(IDS)]


def test_replies_are_greedy(model: ReferenceModel) -> None:
    decoder = CascadeDecoder(model, SHAPE, AVERAGE)
    said = decoder.reply(IDS[:70], 5)
    decoder.reset()
    hidden = decoder.feed(IDS[:70] + said[:-1])
    with torch.no_grad():
        assert model.logits(hidden[-5:]).argmax(-1).tolist() == said


def test_requests_side_by_side_are_those_alone(model: ReferenceModel) -> None:
    prompts = [IDS, IDS[:70], IDS[3:52]]
    alone = [CascadeDecoder(model, SHAPE, AVERAGE).reply(prompt, 4) for prompt in prompts]
    decoder = CascadeDecoder(model, SHAPE, AVERAGE, slots=3)
    assert decoder.replies(prompts, 4) == alone
    assert decoder.replies(prompts[:2], 4) == alone[:2]
    decoder.reset()
    hidden = decoder.feed_all(prompts)
    for prompt, got in zip(prompts, hidden, strict=True):
        torch.testing.assert_close(got, CascadeDecoder(model, SHAPE, AVERAGE).feed(prompt))


@pytest.mark.parametrize("scored", [True, False])
def test_positions_are_those_of_the_keys_that_are_held(model: ReferenceModel, scored: bool) -> None:
    decoder = CascadeDecoder(model, SHAPE, AVERAGE, scored=scored, slots=2, positions=True)
    keys = CascadeDecoder(model, CascadeShape(128, 0, 1, 128), AVERAGE, slots=2)
    for part in (slice(0, 60), slice(60, 61), slice(61, 120)):
        for one in (decoder, keys):
            one.feed_all([IDS[::-1][part], IDS[part]])
    assert decoder.positions is not None
    held = SHAPE.held(len(IDS))
    # Keys of the first layer follow from tokens and positions alone.
    for slot in range(2):
        at = decoder.positions[0, slot, :, :held]
        want = keys.state.k[0, slot].gather(1, at[..., None].expand(*at.shape, SMALL.head_dim))
        torch.testing.assert_close(decoder.state.k[0, slot, :, :held], want)
        assert (at.diff(dim=-1) > 0).all()
    assert decoder.held(0, 0, SHAPE.sinks) == (1.0, 1.0)
    one_head, some_head = decoder.held(1, 10, 80)
    assert 0 < one_head <= some_head < 1


def test_an_interval_holds_the_mean() -> None:
    assert interval([0.5]) == (0.5, 0.5)
    low, high = interval([0.0, 1.0] * 50)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.96 * 0.05, rel=0.02)


def test_keys_lie_beyond_the_window_and_are_scored_by_digit() -> None:
    folder = configs_dir() / "reference" / "model"
    study = CascadeStudy(load(folder), FileEncoder(folder), window=256, stride=64, sinks=16)
    (sample,) = study.passkeys(1024, 1, seed=0)
    assert 0 < sample.needle_spans[0][0] < len(sample.prompt_ids) - 320
    with pytest.raises(ValueError, match="inside of 320"):
        study.passkeys(340, 1, seed=0)
    begin, end = sample.needle_spans[0]
    twice = repeated(sample, 2)
    assert twice.prompt_ids[end : 2 * end - begin] == sample.prompt_ids[begin:end]
    assert twice.prompt_ids[2 * end - begin :] == sample.prompt_ids[end:]
    assert repeated(sample, 1) == sample
    key = sample.values[0]
    assert digits_right(sample, sample.answer) == len(key)
    wrong = key[0] + str((int(key[1]) + 1) % 10) + key[2:]
    assert digits_right(sample, f"The pass key is {wrong}.") == len(key) - 1
    assert digits_right(sample, "no number") == 0
    for levels in (1, 2):
        study.remember(Arm(levels), [sample], 1024)
        study.loss(Arm(levels), 512, 2)
    one, two = study.rows[0], study.rows[2]
    assert two["gain"] == pytest.approx(two["digits"] - one["digits"])
    more = [b - a for a, b in zip(study.rows[1]["loss_of_each"], study.rows[3]["loss_of_each"],
                                  strict=True)]  # fmt: skip
    assert study.rows[3]["more_interval"] == pytest.approx(interval(more))
    study.remember(Arm(2), [twice], 1024, 2)
    assert "gain" not in study.rows[-1]  # no window answered these prompts
    table = summary({"rows": study.rows})
    assert "1,024 tokens, said 1" in table
    assert "1,024 tokens, said 2" in table
    assert f"| {Arm(2).name} | " in table
    assert len({arm.name for arm in ARMS}) == len(ARMS)


@pytest.mark.parametrize("name", ["passkeys", "texts"])
def test_the_committed_tables_are_those_of_the_committed_rows(name: str) -> None:
    report = configs_dir() / "reference" / "cascade-report"
    result = json.loads(gzip.decompress((report / f"{name}.json.gz").read_bytes()))
    assert summary(result) in (report / "README.md").read_text()
    assert {row["name"] for row in result["rows"]} == {arm.name for arm in ARMS}
