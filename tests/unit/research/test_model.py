# SPDX-License-Identifier: Apache-2.0
"""The shipped model: loads as it is, keeps its size limit, retrieves what a window loses."""

import json
from pathlib import Path

import pytest
import torch
from rounding import logprob_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_sparse.research.export import MAX_BYTES, load
from sglang_sparse.research.model import ModelConfig
from sglang_sparse.research.policies import WINDOW, Policy
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import FileEncoder, TaskSuite

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"


@pytest.fixture(scope="module")
def study() -> Study:
    torch.manual_seed(0)
    return Study(load(MODEL).eval(), FileEncoder(MODEL), count=6, seed=2)


def test_geometry_is_what_sparse_attention_needs() -> None:
    config = ModelConfig.from_hf(json.loads((MODEL / "config.json").read_text()))
    assert config.layers >= 6
    assert config.kv_heads >= 4
    assert config.group >= 2
    assert config.head_dim == 64
    assert config.max_positions == 32768
    assert (MODEL / "model.safetensors").stat().st_size <= MAX_BYTES


def test_transformers_computes_the_same_logits(study: Study) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = torch.tensor([study.suite.sample("multi_key", 512, 0).prompt_ids])
    with torch.no_grad():
        ours = study.model.logits(study.model(ids))
        # Both are off, as are a logit and the sum that make up a log-probability.
        torch.testing.assert_close(
            ours, theirs(ids).logits, rtol=0, atol=logprob_error(ids.shape[1])
        )


def test_chat_template_renders_what_the_tasks_render() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sample = TaskSuite(FileEncoder(MODEL)).sample("passkey", 512, 0)
    text = tokenizer.apply_chat_template(
        sample.messages, add_generation_prompt=True, tokenize=False
    )
    assert text == sample.prompt
    assert tokenizer.encode(text, add_special_tokens=False) == sample.prompt_ids
    assert tokenizer.eos_token == "<|end|>"


def test_tokenizer_splits_digits_and_round_trips() -> None:
    encoder = FileEncoder(MODEL)
    text = "Été 2024: 日本 costs 48213 €\n\tindented"
    assert encoder.decode(encoder.encode(text)) == text
    assert len(encoder.encode("48213")) == 5


@pytest.mark.parametrize("task", ["single_key", "multi_key"])
def test_retrieves_at_1k_dense_and_sparse_but_not_through_the_window(
    study: Study, task: str
) -> None:
    parts = study.prepare(task, 1024)
    assert study.exact(parts, Policy()) >= 5
    assert study.exact(parts, Policy("sparcas", 256)) >= 5
    assert study.exact(parts, Policy("page_minmax", 256)) >= 5
    far = [s.needle_spans[0][1] < 700 for samples, _ in parts for s in samples].count(True)
    assert study.exact(parts, WINDOW) <= study.count - far + 1


def test_cutting_the_retrieval_layer_to_the_window_loses_needles(study: Study) -> None:
    parts = study.prepare("single_key", 1024)
    cut = torch.zeros(6, 4, dtype=torch.bool)
    cut[5] = True
    far = [s.needle_spans[0][1] < 700 for samples, _ in parts for s in samples].count(True)
    assert far >= 2
    assert study.exact(parts, Policy(), cut) <= study.count - far + 1
