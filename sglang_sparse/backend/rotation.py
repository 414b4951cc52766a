# SPDX-License-Identifier: Apache-2.0
"""The rotation of a model's queries and keys, for a cache that rotates them by itself.

The model is told position 0 for every token, where its rotation must leave vectors as they are.
Kernels then rotate by the table that is read here, with the positions of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils.hf_transformers_utils import get_context_length

from sglang_sparse import compat
from sglang_sparse.checks import refuse
from sglang_sparse_kernels.cascade.reference import rotate

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_sparse.config import ConfigError

# Channels of random vectors are near 1. A model may round cosines to bf16 first, which moves a
# channel by a few times 2^-8; any other rotation moves some by far more than this.
_SAME = 2.0**-5


def rotation_table(runner: ModelRunner, rows: int) -> torch.Tensor:
    """Cosines and sines of the first ``rows`` positions, float32 [rows, head_dim].

    Raises:
        ConfigError: the model has no rotary embedding, several tables, a rotation at position 0
            that is not the identity, or one that the kernels do not compute; or its configuration
            gives it fewer positions than ``rows``.
    """
    path = runner.server_args.model_path

    def refused(found: str) -> ConfigError:
        return refuse(
            "--model-path",
            path,
            "models that rotate whole heads by one table, by nothing at position 0",
            f"{found}: serve it with another method",
        )

    if compat.writes_kv_in_rope(runner.model):
        raise refused("this one writes K and V inside its RoPE kernel, past the cache")
    ropes = compat.rotary_embeddings(runner.model)
    if ropes is None:
        raise refused("a layer of this one has no rotary embedding")
    if len(ropes) != 1:
        raise refused(f"this one has {len(ropes)} rotary embeddings")
    (rope,) = ropes
    dim = runner.model_config.head_dim
    table = getattr(rope, "cos_sin_cache", None)
    if table is None or table.dim() != 2 or table.shape[1] != dim:
        raise refused(f"the {type(rope).__name__} of this one is not such a table")
    # SGLang lengthens tables to --context-length, which may lie beyond what the model knows.
    known = min(get_context_length(runner.model_config.hf_text_config), table.shape[0])
    if known < rows:
        raise refuse(
            "--sparse-config",
            "retention",
            f"at most {known} tokens held, the positions that the model knows",
            f"lower retention.window or retention.stride: {rows} would be held",
        )
    cos_sin = table[:rows].detach().to(runner.device, torch.float32).contiguous().clone()
    cos, sin = cos_sin[0].chunk(2)
    if not (torch.allclose(cos, torch.ones_like(cos)) and torch.allclose(sin, sin * 0)):
        raise refused("its RoPE scaling changes vectors at position 0")
    if not _rotates_alike(rope, cos_sin, runner):
        raise refused(f"the {type(rope).__name__} of this one rotates otherwise")
    return cos_sin


def _rotates_alike(rope: Any, cos_sin: torch.Tensor, runner: ModelRunner) -> bool:
    """Whether the model's own rotation of random vectors is that of the table."""
    dim, device = cos_sin.shape[1], cos_sin.device
    positions = torch.tensor([0, 1, len(cos_sin) // 2, len(cos_sin) - 1], device=device)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, len(positions), dim, generator=generator)
    query, key = vectors.to(device, runner.dtype)
    want = rotate(torch.stack((query, key)), cos_sin[positions])
    got = torch.stack([x.view_as(query) for x in rope(positions, query.clone(), key.clone())])
    return bool(((got.to(want.dtype) - want).abs() <= _SAME * want.abs().amax()).all())
