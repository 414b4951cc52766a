# SPDX-License-Identifier: Apache-2.0
"""Real pools, a real tree and a real model config of a tiny shape, as SGLang builds them."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

from sglang_sparse import compat
from sglang_sparse_kernels.common import Impl
from sglang_sparse_radix.branches import SparseFrom
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class

LAYERS, HEADS, DIM, VOCAB = 2, 2, 8, 64
# What SGLang's scheduler does, by the module of `compat` that fits the installed version.
scheduler = importlib.import_module(f"scheduler_{compat.current().__name__.rpartition('.')[2]}")

ASKED = "sparse_from"


def asked_for(server_args: object, req: Req) -> SparseFrom:
    """From where a request of these tests attends sparsely, for the tree's factory."""
    sparse: SparseFrom = req.sampling_params.custom_params[ASKED]
    return sparse


def tiny_model_config(folder: Path, **changes: int) -> ModelConfig:
    """A real `ModelConfig` of a two-layer Llama shape; `changes` replace entries of it."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * DIM,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return ModelConfig(str(folder))


@contextmanager
def configurator_of(
    model_config: ModelConfig, page_size: int, kv_dtype: torch.dtype = torch.bfloat16
) -> Iterator[KVCacheConfigurator]:
    """A `KVCacheConfigurator` with the fields that its pool builders and the cell size read."""
    kvc = KVCacheConfigurator.__new__(KVCacheConfigurator)
    layers = model_config.num_hidden_layers
    fields = scheduler.CONFIGURATOR | {
        "kv_cache_dtype_str": "auto",
        "kv_cache_dtype": kv_dtype,
        "model_config": model_config,
        "layer_info": SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
        "device": "cpu",
        "post_capture_kv_active": False,
        "page_size": page_size,
        "use_mla_backend": False,
        "is_draft_worker": False,
    }
    with (
        get_context().override_server_args(page_size=page_size, device="cpu") as server_args,
        get_parallel().override(attn_tp_size=1),
    ):
        for name, value in (fields | {"server_args": server_args}).items():
            object.__setattr__(kvc, name, value)
        yield kvc


def make_pool(
    spec: PlaneSpec,
    *,
    page_size: int,
    num_pages: int,
    dtype: torch.dtype = torch.bfloat16,
    impl: Impl = "torch",
) -> SparseMHATokenToKVPool:
    """A pool as the out-of-tree platform's path of SGLang builds it."""
    return bind_pool_class(spec, impl)(
        num_pages * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=LAYERS,
    )


def build_context(
    pool: MHATokenToKVPool, *, page_size: int, requests: ReqToTokenPool, **changes: object
) -> TreeCacheBuildContext:
    """What `build_kv_cache` hands to the radix-cache factory; `changes` replace fields of it.

    With `is_eagle` the tree is built for EAGLE: it holds pairs of tokens.
    """
    is_eagle = bool(changes.pop("is_eagle", False))
    server_args = get_server_args()
    allocator = scheduler.ALLOCATOR(
        pool.size,
        page_size=page_size,
        dtype=pool.dtype,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )
    allocator.debug_mode = True
    disable = bool(changes.get("disable_radix_cache", False))
    fields: dict[str, object] = {
        "server_args": server_args,
        "params": CacheInitParams(
            disable=disable,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            is_eagle=is_eagle,
        ),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": disable,
        "tp_worker": None,
        "model_config": None,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    return TreeCacheBuildContext(**(fields | scheduler.CONTEXT | changes))
