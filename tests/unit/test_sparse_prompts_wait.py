# SPDX-License-Identifier: Apache-2.0
"""A sparse prompt reads the pool's buffers itself, so it waits for loads from the host itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.backend.attention import SparseAttentionBackend
from sglang_sparse_kernels import KVScales


@pytest.mark.parametrize("attends", [True, False])
def test_a_layer_is_waited_for_before_it_is_read(attends: bool) -> None:
    said: list[Any] = []

    def read(program: object, q: torch.Tensor, *_: object) -> torch.Tensor:
        said.append("read")
        return q

    # Stand-ins for the parts of a backend that one layer of a prompt asks.
    backend = object.__new__(SparseAttentionBackend)
    loads = SimpleNamespace(wait=said.append)
    backend.token_to_kv_pool = SimpleNamespace(loads=loads)
    steps = SimpleNamespace(batch=object(), run=read, end_layer=lambda layer: None)
    backend.extend = steps  # type: ignore[assignment]
    backend._programs = {3: SimpleNamespace(attends=attends)}  # type: ignore[dict-item]
    dense = SimpleNamespace(forward_extend=lambda *_, **__: said.append("dense"))
    backend._inner = SimpleNamespace(current=dense)  # type: ignore[assignment]
    no_scales = SimpleNamespace(read=lambda layer: KVScales(), write=lambda layer: (None, None))
    backend._stored = no_scales  # type: ignore[assignment]
    shape = {"tp_q_head_num": 2, "head_dim": 4, "scaling": 1.0, "logit_cap": 0.0}
    layer: Any = SimpleNamespace(layer_id=3, **shape)
    mode = SimpleNamespace(is_target_verify=lambda: False)
    batch: Any = SimpleNamespace(forward_mode=mode)
    nothing: Any = None
    backend.forward_extend(torch.zeros(6, 8), nothing, nothing, layer, batch, save_kv_cache=False)
    assert said[0] == 3
    assert said[-1] == "read"
