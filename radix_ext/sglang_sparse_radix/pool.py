# SPDX-License-Identifier: Apache-2.0
"""SGLang's MHA KV pool with selection planes beside its K and V rows.

Seams (under `sglang/srt/mem_cache/`, the same from sglang 0.5.17 to 0.5.23 unless said otherwise):
  `memory_pool.py`: `MHATokenToKVPool._create_buffers`, `get_kv_size_bytes`,
      `_finalize_allocation_log`, `get_key_buffer` (views fp8 rows, stored as bytes, in
      their dtype). From 0.5.23 on K and V of a layer are halves of one tensor; each
      is contiguous, as before.
  `kv_cache_configurator.py`: `_build_mha_kv_pool` (takes `mha_pool_class`); in 0.5.17 also
      `_build_oot_mha_kv_pool` (takes the platform's `get_mha_kv_pool_cls()` and passes no
      `v_head_dim`, post-capture or copy arguments)

K rows reach the pool through `set_kv_buffer`, or through a kernel that writes the buffers directly
(fused RoPE). So the pool cannot see every write. The attention backend therefore calls
`update_planes` once in each forward pass, for all layers, with the positions that the pass wrote.
`host_loads` sees to K rows that come back from the host. Every other writer that this pool inherits
is refused below, because it would move or replace K rows without that call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_sparse_kernels.common import IMPLS, Impl, check_choice, take
from sglang_sparse_kernels.planes import PlaneBuffers, PlaneShape, update_planes
from sglang_sparse_radix.host_loads import HostLoads
from sglang_sparse_radix.planes_spec import PlaneSpec, plane_bytes_per_token
from sglang_sparse_radix.verify import PlaneMismatch, compare_planes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class SparseMHATokenToKVPool(MHATokenToKVPool):
    """`MHATokenToKVPool` that also owns the planes of `plane_spec`. Made by `bind_pool_class`.

    Layout: K and V are `[size + page_size, H, D]` per layer, untouched. Plane entries are indexed
    by the physical page, `(size + page_size) // page_size` of them, page 0 (SGLang's padding page)
    included: it starts as zeros and is afterwards written like any other page, so it holds what
    K row 0 holds.

    Attributes:
        planes: the `PlaneBuffers`; their layer axis holds `plane_layers`, see `plane_of`.
        plane_layers: global ids of this rank's layers that have planes, ascending.
        loads: K and V that come back from the host.
        num_pages: physical pages, the padding page included.
    """

    plane_spec: ClassVar[PlaneSpec]
    impl: ClassVar[Impl]

    planes: PlaneBuffers
    plane_layers: tuple[int, ...]
    num_pages: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `MHATokenToKVPool` takes.

        Raises:
            RuntimeError: the planes are not defined for the pool's layout or dtype.
            ValueError: the page size is not one that the planes can be indexed by.
        """
        if not hasattr(type(self), "plane_spec"):
            raise RuntimeError(
                "SparseMHATokenToKVPool has no plane spec; build the class with bind_pool_class"
            )
        self.loads = HostLoads(self)
        super().__init__(*args, **kwargs)

    # -- allocation and accounting ---------------------------------------------------------------

    def _create_buffers(self) -> None:
        self._refuse_unsupported_layout()
        super()._create_buffers()
        self.num_pages = (self.size + self.page_size) // self.page_size
        self.plane_layers = self.plane_spec.layers(self.start_layer, self.layer_num)
        self._plane_keys = [self.get_key_buffer(layer) for layer in self.plane_layers]
        pointers = [keys.data_ptr() for keys in self._plane_keys]
        self._plane_key_ptrs = torch.tensor(pointers, dtype=torch.uint64, device=self.device)
        # K's and V's own region and memory pool: planes are paused and resumed with them.
        with (
            self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE),
            torch.cuda.use_mem_pool(self.custom_mem_pool)
            if self.enable_custom_mem_pool
            else nullcontext(),
        ):
            self.planes = self._allocate_planes()

    def _allocate_planes(self) -> PlaneBuffers:
        shape = PlaneShape(
            num_layers=len(self.plane_layers),
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_heads=self.head_num,
            head_dim=self.head_dim,
            kv_dtype=self.dtype,
        )
        return self.plane_spec.allocate(shape, self.device)

    def _clear_buffers(self) -> None:
        del self.planes, self._plane_keys
        super()._clear_buffers()

    def plane_of(self, layer: int) -> int:
        """Where the planes of a layer, named by its global id, lie on the planes' layer axis.

        Raises:
            ValueError: the layer has none.
        """
        return self.plane_layers.index(layer)

    def plane_bytes(self) -> int:
        """Bytes of all planes, the padding page included."""
        return self.planes.num_bytes()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(K bytes + plane bytes, V bytes).

        SGLang logs the pair, adds it up into `mem_usage` and reports that as the pool's memory.
        Planes are derived from K alone, so they are counted with K. The start-up log names them.
        """
        k_bytes, v_bytes = super().get_kv_size_bytes()
        return int(k_bytes) + self.plane_bytes(), int(v_bytes)

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        super()._finalize_allocation_log(num_tokens)
        total, planes = sum(self.get_kv_size_bytes()), self.plane_bytes()
        logger.info(
            "KV planes are allocated. planes: %s, size: %.2f GB, counted in K size above, "
            "%.1f%% on top of K and V",
            ", ".join(self.planes.tensors()) or "none",
            planes / _GIB,
            100 * planes / max(1, total - planes),
        )

    # -- keeping the planes right ----------------------------------------------------------------

    def update_planes(
        self,
        page_table: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        max_new_tokens: int,
    ) -> None:
        """Bring every plane up to date for positions `[start, end)` of each row.

        Call it once a forward pass, after the last layer wrote K: extend rows with
        `[prefix_len, seq_len)`, decode rows with `[seq_len - 1, seq_len)`. A logical page that the
        range touches is recomputed from its first row, so what an earlier owner left in it never
        survives.

        Args:
            page_table: int32 `[R, max_pages]`, physical page of each logical one.
            start, end: int32 `[R]`, token positions; an empty range leaves a row alone.
            max_new_tokens: host upper bound of `end - start` over the rows.
        """
        if not self.plane_layers:
            return
        update_planes(
            self._plane_keys,
            self._plane_key_ptrs,
            self.planes,
            page_table,
            start,
            end,
            page_size=self.page_size,
            max_new_tokens=max_new_tokens,
            impl=self.impl,
        )

    def verify_planes(
        self, pages: torch.Tensor, valid_tokens: torch.Tensor | None = None
    ) -> list[PlaneMismatch]:
        """Compare planes with recomputation from the K rows now in `pages`, for tests.

        Args:
            pages: int64 `[N]`, physical page ids.
            valid_tokens: int64 `[N]`, rows of each page that are written (1..P); None = all.

        Returns:
            One entry per wrong (layer, page, plane), empty when the planes are right; its layer is
            a global id. It copies to the host: never call it on the decode path.
        """
        found = compare_planes(
            self._rows_of(pages),
            self.plane_spec.planes,
            self.planes.tensors(),
            pages,
            valid_tokens,
            page_size=self.page_size,
        )
        return [replace(wrong, layer=self.plane_layers[wrong.layer]) for wrong in found]

    def _rows_of(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """K rows of pages `[N, P, H, D]`, of each layer that has planes."""
        for keys in self._plane_keys:
            yield take(keys.view(-1, self.page_size, *keys.shape[1:]), pages)

    # -- what would leave planes wrong -------------------------------------------------------------

    def _refuse_unsupported_layout(self) -> None:
        self.plane_spec.validate_page_size(self.page_size)
        if self.is_quantized_kv_cache:
            self._refuse(
                f"quantized KV (method {self.quant_method.name!r})",
                "start with --kv-cache-dtype bfloat16 or fp8_e4m3",
            )
        try:
            self.plane_spec.validate_kv_dtype(self.dtype)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        if self.use_hnd:
            self._refuse("the HND KV layout", "unset SGLANG_USE_HND_KVCACHE")
        if self.kv_cache_layout != "nhd":
            self._refuse(
                f"the KV layout {self.kv_cache_layout!r}",
                "start without --enable-page-major-kv-layout or SGLANG_AITER_KV_CACHE_LAYOUT",
            )
        if self.post_capture_active:
            self._refuse("post-capture KV sizing", "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
        if self.v_head_dim != self.head_dim:
            self._refuse(
                f"v_head_dim {self.v_head_dim} with head_dim {self.head_dim}",
                "serve a model whose K and V heads are equally wide",
            )

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise RuntimeError(
            f"{what} is not supported by the sparse KV planes, which would go wrong in silence; "
            f"{remedy}, or serve without --attention-backend sparse"
        )

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> NoReturn:
        """Refused: rows would move without their planes (trees of draft tokens)."""
        self._refuse("moving KV rows (move_kv_cache)", "start without --speculative-algorithm")

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: writes draft rows that the plane update does not see (speculative decoding)."""
        self._refuse(
            "committing draft KV rows (set_kv_buffer_prefix_valid)",
            "start without --speculative-algorithm",
        )

    def get_cpu_copy(self, indices: Any, mamba_indices: Any = None) -> NoReturn:
        """Refused: a host copy holds K and V without planes."""
        self._refuse("copying KV to the host (get_cpu_copy)", "start without host KV offload")

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Any, mamba_indices: Any = None) -> NoReturn:
        """Refused: K rows would change under their planes."""
        self._refuse("loading KV from the host (load_cpu_copy)", "start without host KV offload")

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Refused: PD disaggregation would transfer K and V without planes."""
        self._refuse(
            "KV transfer (get_contiguous_buf_infos)", "start without --disaggregation-mode"
        )

    def finalize_backing(self, config: Any) -> NoReturn:
        """Refused: the planes are sized at construction."""
        self._refuse("post-capture KV sizing", "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")


def bind_pool_class(
    spec: PlaneSpec, impl: Impl, base: type[SparseMHATokenToKVPool] = SparseMHATokenToKVPool
) -> type[SparseMHATokenToKVPool]:
    """A pool class bound to `spec`, with the constructor of `MHATokenToKVPool`.

    Use it as `mha_pool_class` of `KVCacheConfigurator._build_mha_kv_pool`, and as the result of an
    out-of-tree platform's `get_mha_kv_pool_cls()`.

    Args:
        spec: the planes to keep.
        impl: `"triton"`, `"cpu"` or `"torch"`, passed to the plane-update kernel; none falls back
            to another.
        base: the class to bind.

    Raises:
        ValueError: unknown `impl`.
    """
    check_choice("impl", impl, IMPLS)
    return type(base.__name__, (base,), {"plane_spec": spec, "impl": impl, "__doc__": base.__doc__})


def extra_cell_bytes(spec: PlaneSpec, kvc: KVCacheConfigurator, num_layers: int) -> int:
    """Bytes a token that the planes add to SGLang's cell size.

    For a hook around `sglang/srt/model_executor/pool_configurator.py`
    `DefaultPoolConfigurator._compute_cell_size(self, kvc, num_layers)`: return the original's
    result plus this. SGLang then divides the free memory by K, V and planes together, so
    `max_total_num_tokens` is a number of tokens that fits.

    Args:
        spec: planes kept.
        kvc: the hook's second argument; read for model geometry, its first layer, page size and
            KV dtype.
        num_layers: the hook's third argument.

    Raises:
        ValueError: page size or KV dtype not allowed.
    """
    from sglang.srt.runtime_context import get_parallel

    return plane_bytes_per_token(
        spec,
        head_num=kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=kvc.model_config.head_dim,
        page_size=kvc.page_size,
        kv_dtype=kvc.kv_cache_dtype,
        num_layers=len(spec.layers(kvc.layer_info.start_layer, num_layers)),
    )
