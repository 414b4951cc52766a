# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse decode graphs as variants of SGLang 0.5.23's own."""

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_context import has_forward_context
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context

from sglang_sparse import compat
from sglang_sparse.launch import attach


def launch(*, bounded: bool) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(retention=SimpleNamespace(bounded=bounded)))


@pytest.fixture
def variants():
    """What the runner of a sparse server builds, through the hook."""
    load_plugins()
    with get_context().override_server_args(device="cpu") as server_args:
        assert decode_cuda_graph_runner.create_attention_graph_variants(SimpleNamespace()) is None
        attach(server_args, launch(bounded=True))  # every step of `cascade` runs alike
        assert decode_cuda_graph_runner.create_attention_graph_variants(SimpleNamespace()) is None
        attach(server_args, launch(bounded=False))
        yield decode_cuda_graph_runner.create_attention_graph_variants(SimpleNamespace())


def test_a_sparse_server_captures_both(variants):
    assert set(variants.capture_labels) == {"dense", "sparse"}


def resolve(runner: object, batch: object) -> str | None:
    """What SGLang's runner asks for a batch of four, through the hook."""
    runner_class = decode_cuda_graph_runner.DecodeCudaGraphRunner
    return runner_class._resolve_attention_variant(runner, batch, 4)


def test_the_runners_backend_selects_the_graph_of_a_batch(variants):
    asked = []

    def select(batch):
        asked.append(batch)
        return "sparse"

    backend = SimpleNamespace(select_variant=select)
    runner = SimpleNamespace(attention_graph_variants=variants, attn_backend=backend)
    assert not has_forward_context()  # a verification is planned before its forward
    assert resolve(runner, "the batch") == "sparse"
    assert asked == ["the batch"]


def test_other_runners_select_as_they_do(variants):
    own = SimpleNamespace(select=lambda batch: f"own of {batch}")
    assert resolve(SimpleNamespace(attention_graph_variants=own), "the batch") == "own of the batch"
    assert resolve(SimpleNamespace(attention_graph_variants=None), "the batch") is None


@pytest.mark.parametrize("label", ["dense", "sparse"])
def test_the_captured_variant_is_the_capture_loops(variants, label):
    capture_mode._set_capture_attention_variant(label)
    try:
        assert compat.current().variant_being_captured() == label
    finally:
        capture_mode._set_capture_attention_variant(None)
