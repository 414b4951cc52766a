# SPDX-License-Identifier: Apache-2.0
"""What a draft model attends on, and its attention on a CPU against loops."""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from sglang_sparse import compat
from sglang_sparse.backend import inner
from sglang_sparse.backend.draft_steps import DraftStep, DraftSteps
from sglang_sparse.backend.drafts import create_decode_backend, create_draft_extend_backend
from sglang_sparse.backend.torch_native import TorchNativeBackend
from sglang_sparse.config import Resolved, load_preset
from sglang_sparse.launch import SparseLaunch, attach

HEADS, KV_HEADS, DIM, PAGE, SLOTS, STEPS = 4, 2, 16, 16, 160, 3


@pytest.fixture
def runner() -> SimpleNamespace:
    """What a backend reads of a model runner: real pools, rows at odd slots, poisoned elsewhere."""
    pool = MHATokenToKVPool(SLOTS, PAGE, torch.float32, KV_HEADS, DIM, 1, "cpu", False)
    pool.k_buffer[0].fill_(float("nan"))
    pool.v_buffer[0].fill_(float("nan"))
    requests = ReqToTokenPool(4, 64, "cpu", False)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(SLOTS, generator=generator)
    requests.req_to_token[1, :64] = slots[:64]
    requests.req_to_token[3, :64] = slots[64:128]
    return SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=requests)


def layer() -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, layer_id=0)


def write(runner: SimpleNamespace, row: int, start: int, end: int, seed: int) -> None:
    """Store random keys and values of a row's positions."""
    generator = torch.Generator().manual_seed(seed)
    slots = runner.req_to_token_pool.req_to_token[row, start:end].long()
    for buffer in (runner.token_to_kv_pool.k_buffer[0], runner.token_to_kv_pool.v_buffer[0]):
        buffer[slots] = torch.randn((end - start, KV_HEADS, DIM), generator=generator)


def attention(runner: SimpleNamespace, row: int, length: int, q: torch.Tensor) -> torch.Tensor:
    """One query [heads, head_dim] over the first tokens of a row, in fp64."""
    pool, out = runner.token_to_kv_pool, torch.empty(HEADS, DIM, dtype=torch.float64)
    slots = runner.req_to_token_pool.req_to_token[row, :length].long()
    for head in range(HEADS):
        k, v = (
            b[slots, head * KV_HEADS // HEADS].double()
            for b in (pool.k_buffer[0], pool.v_buffer[0])
        )
        out[head] = torch.softmax(k @ q[head].double() * DIM**-0.5, 0) @ v
    return out


@pytest.mark.parametrize("step", range(STEPS - 1))
def test_a_step_of_a_draft_attends_to_the_tokens_that_were_drafted(
    runner: SimpleNamespace, step: int
) -> None:
    rows, lengths = torch.tensor([3, 1]), torch.tensor([37, 5])
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        write(runner, row, 0, length + step, seed=row)
    table = runner.req_to_token_pool.req_to_token
    batch = SimpleNamespace(
        req_pool_indices=rows,
        seq_lens=lengths,
        out_cache_loc=table[rows, lengths + step].long(),
        encoder_lens=None,
    )
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((2, HEADS * DIM), generator=generator)
    k, v = (torch.randn((2, KV_HEADS, DIM), generator=generator) for _ in range(2))
    steps = DraftSteps(runner, STEPS)
    assert len(steps.attn_backends) == STEPS - 1
    found = steps.attn_backends[step].forward_decode(q, k, v, layer(), batch)
    assert batch.seq_lens is lengths  # all steps of a draft share the batch
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        want = attention(runner, row, length + step + 1, q[i].view(HEADS, DIM))
        torch.testing.assert_close(found[i].view(HEADS, DIM).double(), want, rtol=1e-4, atol=1e-5)


def factory(runner: SimpleNamespace, named: str | None, *, sparse: bool, steps: int = STEPS) -> Any:
    """SGLang's own factory for a draft model."""
    args = SimpleNamespace(
        attention_backend="sparse",
        device="cpu",
        decode_attention_backend=None,
        prefill_attention_backend=None,
        speculative_draft_attention_backend=named,
    )
    if sparse:
        config = load_preset("reference", "page_minmax")
        attach(
            args, SparseLaunch(Resolved(config=config, method="page_minmax", source="", hash=""))
        )
    runner.server_args, runner.draft_attention_backend = args, named
    takes_flags = "server_args" in signature(DraftBackendFactory).parameters
    return DraftBackendFactory(*[args] * takes_flags, runner, 1, steps)


HOOKS = [create_decode_backend, create_draft_extend_backend]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("named", "inner_name", "told"),
    [
        (None, "flashinfer", "flashinfer"),
        (None, "triton", "triton"),
        ("fa3", "flashinfer", "fa3"),
    ],
)
def test_sglang_builds_what_it_has_for_the_dense_backend_or_the_one_that_the_user_names(
    runner: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    hook: Any,
    named: str | None,
    inner_name: str,
    told: str,
) -> None:
    monkeypatch.setattr(inner, "dense_name", lambda runner: inner_name)
    found = factory(runner, named, sparse=True)
    assert hook(lambda factory: factory.draft_attn_backend, found) == told


@pytest.mark.parametrize("hook", HOOKS)
def test_a_dense_server_is_left_alone(runner: SimpleNamespace, hook: Any) -> None:
    found = factory(runner, None, sparse=False)
    assert hook(lambda factory: factory.draft_attn_backend, found) is None


@pytest.mark.parametrize("named", [None, "torch_native"])
def test_a_cpu_takes_pytorch(
    runner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setattr(compat, "resolved", lambda args: args)

    def never(factory: Any) -> None:
        raise AssertionError("SGLang has no draft backend in PyTorch")

    found = create_decode_backend(never, factory(runner, named, sparse=True))
    assert [type(step) for step in found.attn_backends] == [DraftStep] * (STEPS - 1)
    extend = create_draft_extend_backend(never, factory(runner, named, sparse=True))
    assert type(extend) is TorchNativeBackend
    # One draft is what draft extension gives.
    assert create_decode_backend(never, factory(runner, named, sparse=True, steps=1)) is None
