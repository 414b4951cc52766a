# SPDX-License-Identifier: Apache-2.0
"""KV that comes back from the host: who waits for it, and its planes.

The host tier (SGLang's hierarchical cache) holds K and V alone. A plane follows from K, so it is
computed anew when its pages come back, and takes no byte of the host.

Seams (under `sglang/srt/` of sglang 0.5.17):
  `mem_cache/memory_pool.py`: `KVCache.layer_transfer_counter`, None without a host tier, and
      `get_key_buffer`, which waits on it for readers that ask the pool
  `managers/cache_controller.py`: `LayerDoneCounter.wait_until`, `consumer_index` (the load that
      the running batch waits for; -1 for none), `HiCacheController.start_loading`
"""

from typing import Any, Protocol

import torch

# Triton compiles a kernel anew for another kind of stride. A table of one row has no use for its
# stride, so all loads get the same one.
_ROW_STRIDE = 16


class PoolWithPlanes(Protocol):
    """What is asked of `SparseMHATokenToKVPool`."""

    layer_transfer_counter: Any
    start_layer: int
    end_layer: int
    page_size: int

    def update_planes(
        self,
        page_table: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        max_new_tokens: int,
    ) -> None: ...


class HostLoads:
    """Loads that forward passes wait for.

    A load is started for a prefill batch, and SGLang says which one while that batch runs. It need
    not belong to a request of the batch: one that was matched and then did not fit has started its
    load, too. So planes follow the load, not a request.

    Without a host tier nothing is ever expected, and both calls of the backend return at once.
    """

    def __init__(self, pool: PoolWithPlanes) -> None:
        """For the pages of `pool`."""
        self._pool = pool
        self._slots: dict[int, torch.Tensor] = {}

    def expect(self, consumer: int, slots: torch.Tensor) -> None:
        """Note what a load writes.

        Args:
            consumer: number of the load, which the batch that waits for it carries.
            slots: int64 `[n * P]`, KV slots of whole pages, on the pool's device.
        """
        self._slots[consumer] = slots

    def wait(self, layer: int) -> None:
        """Let the stream wait until K and V of a layer (its global id) are there.

        For readers of the pool's buffers that do not ask SGLang's getters for them.
        """
        counter = self._pool.layer_transfer_counter
        if counter is not None:
            counter.wait_until(layer - self._pool.start_layer)

    def update_planes(self) -> None:
        """Compute the planes of what this batch waited for; once a prefill, after the last layer.

        Nothing reads them before: prompts are scored with keys, or compute the planes they read
        themselves, and requests that decode on these pages come after this batch.
        """
        counter = self._pool.layer_transfer_counter
        slots = None if counter is None else self._slots.pop(counter.consumer_index, None)
        if slots is None:
            return
        # A batch without a prefix has not waited; layers are loaded in their order.
        self.wait(self._pool.end_layer - 1)
        if slots.is_cuda:  # made on the scheduler's stream
            slots.record_stream(torch.cuda.current_stream())
        pages = (slots[:: self._pool.page_size] // self._pool.page_size).to(torch.int32)
        start = torch.zeros(1, dtype=torch.int32, device=slots.device)
        end = torch.full_like(start, len(slots))
        table = pages.as_strided((1, len(pages)), (_ROW_STRIDE, 1))
        self._pool.update_planes(table, start, end, max_new_tokens=len(slots))
