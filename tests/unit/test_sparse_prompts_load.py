# SPDX-License-Identifier: Apache-2.0
"""Sparse prompts read keys and values that may still be on their way from host memory."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sparse.backend.attention import SparseAttentionBackend


class Recorded(SparseAttentionBackend):
    """Notes what a layer of a prompt does, in order."""

    def __init__(self, done: list[str], *, attends: bool) -> None:
        self.done = done
        note = done.append
        loads = SimpleNamespace(wait=lambda layer: note(f"wait for {layer}"))
        inner = SimpleNamespace(forward_extend=lambda *args, **kwargs: note("dense"))
        facade: Any = self
        facade.token_to_kv_pool = SimpleNamespace(loads=loads)
        facade._inner = SimpleNamespace(current=inner)
        facade._programs = {3: SimpleNamespace(attends=attends)}
        facade.extend = SimpleNamespace(batch="a batch", run=None, end_layer=lambda layer: None)

    def _write(self, *args: Any) -> None:
        self.done.append("write")

    def _run(self, *args: Any) -> Any:
        self.done.append("attend")


@pytest.mark.parametrize(
    ("attends", "then"), [(True, ["write", "attend"]), (False, ["dense", "attend"])]
)
def test_a_layer_waits_for_its_load_before_it_writes_and_attends(
    attends: bool, then: list[str]
) -> None:
    done: list[str] = []
    backend = Recorded(done, attends=attends)
    mode = SimpleNamespace(is_target_verify=lambda: False)
    layer: Any = SimpleNamespace(layer_id=3)
    rows: Any = None
    batch: Any = SimpleNamespace(forward_mode=mode)
    backend.forward_extend(rows, rows, rows, layer, batch)
    assert done == ["wait for 3", *then]
