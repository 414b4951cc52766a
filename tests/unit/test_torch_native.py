# SPDX-License-Identifier: Apache-2.0
"""Dense prompts on a CPU: SGLang's results, for less work."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_sparse.backend import torch_native
from sglang_sparse.backend.inner import InnerBackends
from sglang_sparse.backend.torch_native import TorchNativeBackend

KV_HEADS, DIM, LONGEST = 2, 16, 1900
RUNNER: Any = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
Batch = list[tuple[int, int]]  # tokens before, and new ones, of each request
BATCHES: list[Batch] = [
    [(1837, 1)],
    [(0, 1), (33, 4), (0, 517)],
    [(0, 17), (29, 1), (4, 4)],
    [(300, 601), (299, 601), (1, 0), (700, 1111)],
]


def both(batch: Batch, heads: int, dtype: torch.dtype, **kind: Any) -> list[torch.Tensor]:
    """SGLang's result and ours; slots that no request has are NaN."""
    random = torch.Generator().manual_seed(len(batch))
    slots = torch.randperm(len(batch) * LONGEST, generator=random).view(-1, LONGEST)
    k, v = torch.randn((2, slots.numel(), KV_HEADS, DIM), generator=random).to(dtype)
    for row, length in enumerate(map(sum, batch)):
        k[slots[row, length:]] = v[slots[row, length:]] = torch.nan
    first, new_tokens = torch.tensor(batch, dtype=torch.int32).T
    q = torch.randn((int(new_tokens.sum()), heads, DIM), generator=random).to(dtype)
    rows = (slots.int(), torch.arange(len(batch)), (first + new_tokens).long(), first, new_tokens)
    kind = {"causal": True, "sliding_window_size": None} | kind
    return [
        backend(RUNNER)._run_sdpa_forward_extend(
            q, torch.empty_like(q), k, v, *rows, None,
            scaling=0.3, enable_gqa=heads != KV_HEADS, **kind,
        )
        for backend in (TorchNativeAttnBackend, TorchNativeBackend)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [KV_HEADS, 4 * KV_HEADS])
@pytest.mark.parametrize("batch", BATCHES)
def test_prompts_attend_as_on_sglangs_own(batch: Batch, heads: int, dtype: torch.dtype) -> None:
    theirs, ours = both(batch, heads, dtype)
    slack = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=slack, atol=slack)


@pytest.mark.parametrize("kind", [{"causal": False}, {"sliding_window_size": 7}])
def test_other_kinds_of_attention_are_sglangs_own(kind: dict[str, Any]) -> None:
    theirs, ours = both([(40, 9)], KV_HEADS, torch.float32, **kind)
    assert torch.equal(ours, theirs)


def test_only_new_tokens_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []

    def counted(q: torch.Tensor, k: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        products.append(q.shape[2] * k.shape[2])
        return scaled_dot_product_attention(q, k, *args, **how)

    monkeypatch.setattr(torch_native, "scaled_dot_product_attention", counted)
    both([(1837, 17), (800, 1024)], KV_HEADS, torch.float32)
    assert products == [17 * 1854, 512 * 1312, 512 * 1824]


def test_a_backend_that_is_named_is_sglangs_own() -> None:
    made = [type(InnerBackends(RUNNER, name, "cpu").current) for name in ("auto", "torch_native")]
    assert made == [TorchNativeBackend, TorchNativeAttnBackend]
