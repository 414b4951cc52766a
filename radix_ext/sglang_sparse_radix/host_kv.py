# SPDX-License-Identifier: Apache-2.0
"""A KV pool whose keys and values lie in host memory, with their planes on the device.

Seam: `sglang/srt/mem_cache/memory_pool.py: MHATokenToKVPool` of sglang 0.5.17. Its `__init__` calls
`_create_buffers`, which makes the K and V rows. Its slots are what SGLang's allocator counts, so
that allocator, tree and scheduler stay as they are: a slot is a row in host memory.

Nobody finds rows `[slots, H, D]` here. Keys and values lie in blocks, as
`sglang_sparse_kernels.frames` has them, and who reads or writes them goes through these operators.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from sglang_sparse_kernels.common import take
from sglang_sparse_kernels.planes import PlaneShape, update_planes
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

logger = logging.getLogger(__name__)


class HostMemoryError(RuntimeError):
    """So much host memory cannot be allocated, or not be pinned."""


class HostKVPool(SparseMHATokenToKVPool):
    """`SparseMHATokenToKVPool` without rows on the device. Made by `bind_pool_class`.

    Attributes:
        host: `[layers, pages, H, 2, P, D]`, keys, then values of each block; pinned if the device
            is a GPU. Blocks of a page that a request still writes to lie in pinned frames.
    """

    host: torch.Tensor

    def _create_buffers(self) -> None:
        self._refuse_unsupported_layout()
        self.num_pages = (self.size + self.page_size) // self.page_size
        self.plane_layers = self.plane_spec.layers(self.start_layer, self.layer_num)
        # What SGLang asks of a pool's rows, of which there are none.
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        self._kv_buffer_descs: list[Any] = []
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        shape = (self.layer_num, self.num_pages, self.head_num, 2, self.page_size, self.head_dim)
        self.host = host_blocks(shape, self.dtype, pinned=str(self.device) != "cpu")
        self.planes = self._allocate_planes()

    def _clear_buffers(self) -> None:
        del self.planes, self.host

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(K bytes + plane bytes, V bytes); K and V are host memory."""
        half = self.host.nbytes // 2
        return half + self.plane_bytes(), half

    def _rows_of(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        at = pages.to(self.host.device)
        for layer in self.plane_layers:
            keys = take(self.host[layer - self.start_layer], (at, slice(None), 0))
            yield keys.transpose(1, 2).to(pages.device)

    def _no_rows(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "keys and values lie in blocks in host memory (placement.kind host), not in rows"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _no_rows
    update_planes = _no_rows


def host_blocks(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Zeroed host memory; pinned memory is registered as it is, not rounded up to a power of two.

    It is pinned until no tensor has it any more.

    Raises:
        HostMemoryError: so much memory cannot be allocated, or not be pinned.
    """
    try:
        memory = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    except RuntimeError as error:
        raise HostMemoryError("it cannot be allocated") from error
    # The array outlives all tensors over it, and is told of its end before the memory is freed.
    array = memory.numpy()
    if pinned:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status:
            raise HostMemoryError(f"it cannot be pinned (CUDA error {status})")
        weakref.finalize(array, _unpin, memory.data_ptr()).atexit = False
    return torch.from_numpy(array).view(dtype).view(tuple(shape))


def _unpin(address: int) -> None:
    """End a registration, behind all kernels that may read it: its addresses may be used anew."""
    torch.cuda.synchronize()
    status = int(torch.cuda.cudart().cudaHostUnregister(address))
    if status:
        logger.warning("host memory stays pinned (CUDA error %d)", status)


class StagedPlanes:
    """Planes of pages whose keys lie in rows outside of the pool: computed there, then copied.

    Only planes of logical pages can be copied like this.
    """

    def __init__(self, pool: HostKVPool, keys: Sequence[torch.Tensor]) -> None:
        """Planes of neighbouring layers that have planes.

        Args:
            pool: whose planes are written.
            keys: of each of the layers, `[pages * P, H, D]`, contiguous; read at each update.
        """
        self._pool, self._keys = pool, list(keys)
        device = self._keys[0].device
        pointers = [rows.data_ptr() for rows in self._keys]
        self._pointers = torch.tensor(pointers, dtype=torch.uint64, device=device)
        self._pages = self._keys[0].shape[0] // pool.page_size
        shape = PlaneShape(
            num_layers=len(self._keys),
            num_pages=self._pages,
            page_size=pool.page_size,
            num_heads=pool.head_num,
            head_dim=pool.head_dim,
            kv_dtype=pool.dtype,
        )
        self._planes = pool.plane_spec.allocate(shape, device)

    def update(
        self, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor, *, max_new_tokens: int
    ) -> None:
        """As `SparseMHATokenToKVPool.update_planes`; `table` leads to pages of the keys."""
        update_planes(
            self._keys,
            self._pointers,
            self._planes,
            table,
            start,
            end,
            page_size=self._pool.page_size,
            max_new_tokens=max_new_tokens,
            impl=self._pool.impl,
        )

    def copy(self, layer: int, places: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy entries of pages to the pool.

        Args:
            layer: global id of the first of these layers.
            places: int32 or int64 `[n]`, pages of the keys.
            pages: int64 `[n]`, physical pages of the pool.
        """
        first, count = self._pool.plane_of(layer), len(self._keys)
        staged = self._planes.tensors()
        for name, plane in self._pool.planes.tensors().items():
            fresh = staged[name].view(count, self._pages, -1, *plane.shape[2:])
            stored = plane[first : first + count].view(
                count, self._pool.num_pages, -1, *plane.shape[2:]
            )
            stored.index_copy_(1, pages, fresh.index_select(1, places))

    def nbytes(self) -> int:
        """Device bytes of the planes before they are copied."""
        return self._planes.num_bytes()
