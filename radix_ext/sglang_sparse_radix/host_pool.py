# SPDX-License-Identifier: Apache-2.0
"""SGLang's host KV pool without GPU kernels, for a machine that has no accelerator.

Seam: `sglang/srt/mem_cache/pool_host/mha.py` of sglang 0.5.17. Its `MHATokenToKVPoolHost` pins the
host's memory by CUDA and copies with kernels of a GPU, in `load_to_device_per_layer` and
`backup_from_device_all_layer`. Only these are replaced here. Sizes, layouts and which host slot
goes to which page are SGLang's.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

# SGLang leaves 10 GiB of a GPU's host to others. A machine without a GPU may have no more than
# that, and its KV pool is in the same memory already.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


class PlainHostPool(MHATokenToKVPoolHost):
    """`MHATokenToKVPoolHost` beside a KV pool that is itself in the host's memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `MHATokenToKVPoolHost` takes; nothing is pinned."""
        super().__init__(*args, **(kwargs | {"pin_memory": False}))

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Copy a layer's K and V of host slots to slots of the KV pool, both int64 `[n]`."""
        held = self._index(layer_id, host_indices)
        device_pool.k_buffer[layer_id][device_indices] = self.k_buffer[held]
        device_pool.v_buffer[layer_id][device_indices] = self.v_buffer[held]

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy K and V of all layers the other way; slots as in `load_to_device_per_layer`."""
        for layer in range(self.layer_num):
            held = self._index(layer, host_indices)
            self.k_buffer[held] = device_pool.k_buffer[layer][device_indices]
            self.v_buffer[held] = device_pool.v_buffer[layer][device_indices]

    def _index(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
        """Where a layer's rows of host slots lie in the layout that was asked for."""
        page = self.page_size
        places: dict[str, tuple[torch.Tensor | int, ...]] = {
            "layer_first": (layer, slots),
            "page_first": (slots, layer),
            "page_first_direct": (slots // page, layer, slots % page),
        }
        return places[self.layout]
