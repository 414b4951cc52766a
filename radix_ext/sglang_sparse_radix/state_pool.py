# SPDX-License-Identifier: Apache-2.0
"""A KV pool of state slots: what SGLang counts in tokens has no storage here.

SGLang's scheduler admits and frees requests by token slots. Under a bounded retention these stand
for nothing: a request's keys and values lie in its state slot, whose number follows from its row in
SGLang's request table. So this pool has placeholders where SGLang expects K and V, and one state.

Seams (under `sglang/srt/mem_cache/`): `memory_pool.py: NoOpMHATokenToKVPool`
(`_create_buffers`, `get_kv_size_bytes`, `_finalize_allocation_log`), whose writers raise.
"""

import logging
from typing import Any, TypeVar

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

from sglang_sparse_kernels.cascade import CascadeShape, CascadeState, make_cascade_state
from sglang_sparse_radix.snapshots import SnapshotTree

Row = TypeVar("Row", int, torch.Tensor)

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class StateKVPool(NoOpMHATokenToKVPool):
    """Token slots without storage, and a state slot for each request that may run.

    Attributes:
        state: keys, values and scores of all layers and slots.
        slots: requests that it holds.
        snapshots: states of prefixes, in slots behind those of requests.
    """

    state: CascadeState

    def __init__(
        self,
        *args: Any,
        shape: CascadeShape,
        slots: int,
        snapshots: int,
        page_size: int,
        **kwargs: Any,
    ) -> None:
        """Takes what `MHATokenToKVPool` takes, the cache's shape, and the numbers of slots."""
        self._shape, self.slots, self._all = shape, slots, slots + snapshots
        self.snapshots = SnapshotTree(range(slots, self._all), page_size)
        super().__init__(*args, page_size=page_size, **kwargs)

    def _create_buffers(self) -> None:
        super()._create_buffers()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.state = make_cascade_state(
                self._shape,
                layers=self.layer_num,
                slots=self._all,
                kv_heads=self.head_num,
                dim=self.head_dim,
                dtype=self.store_dtype,
                device=self.device,
            )

    def _clear_buffers(self) -> None:
        del self.state
        super()._clear_buffers()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(bytes of K and of the scores, bytes of V)."""
        v_bytes = self.state.v.nbytes
        return self.state.nbytes - v_bytes, v_bytes

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        self.mem_usage = self.state.nbytes / _GIB
        logger.info(
            "State slots are allocated. #slots: %d of requests and %d of prefixes, tokens held a "
            "slot: %d, size: %.2f GB; SGLang counts %d tokens, which take no memory",
            self.slots,
            self._all - self.slots,
            self._shape.rows,
            self.mem_usage,
            num_tokens,
        )

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: keys and values go to the state, by the attention backend."""
        raise RuntimeError("this pool holds state slots; only the attention backend writes them")

    def layer_state(self, layer: int) -> CascadeState:
        """The state of a layer, named by its global id."""
        return self.state.by_layer[layer - self.start_layer]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the state of all layers from one slot to another."""
        for tensor in (self.state.k, self.state.v, self.state.scores):
            tensor[:, target].copy_(tensor[:, source])

    @staticmethod
    def slot_of(request_row: Row) -> Row:
        """State slot of a row of SGLang's request table, or of each; -1 of row 0, padding."""
        return request_row - 1
