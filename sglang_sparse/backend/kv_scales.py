# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized K and V: what rows are divided by when written, and multiplied by when read.

A checkpoint may bring a scale a layer for keys and one for values. The inner backend and the sparse
stages read each other's rows, so both apply them, or neither does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_sparse import compat
from sglang_sparse.checks import refuse
from sglang_sparse.config import ConfigError
from sglang_sparse_kernels.common import FP8
from sglang_sparse_kernels.records import KVScales

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

# It writes rows without their scales and reads them so, which is right, if less precise.
_UNSCALED = "torch_native"


class StoredKV:
    """How the rows of a pool stand for keys and values.

    Attributes:
        scaled: whether rows are divided by their layer's scales.
    """

    def __init__(self, dtype: torch.dtype, inner: str, layers: Sequence[RadixAttention]) -> None:
        """Check the scales of all ``layers``.

        Args:
            dtype: of the pool's rows.
            inner: name of the dense backend.
            layers: that attend through the pool.

        Raises:
            ConfigError: this SGLang's dense attention would lose a layer's scales.
        """
        self.scaled = dtype == FP8 and inner != _UNSCALED
        for layer in layers:
            scales = KVScales(*compat.kv_scales(layer))
            if scales != KVScales() and inner != _UNSCALED:
                _check(layer, scales, dtype, inner)

    def read(self, layer: RadixAttention) -> KVScales:
        """What the layer's rows are multiplied by."""
        return KVScales(*compat.kv_scales(layer)) if self.scaled else KVScales()

    def write(self, layer: RadixAttention) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What ``set_kv_buffer`` divides the layer's keys and values by; None for nothing."""
        return (layer.k_scale, layer.v_scale) if self.scaled else (None, None)


def _check(layer: RadixAttention, scales: KVScales, dtype: torch.dtype, inner: str) -> None:
    given = f"k_scale {scales.k:g} and v_scale {scales.v:g} of layer {layer.layer_id}"
    if dtype != FP8:
        raise refuse(
            "--kv-cache-dtype",
            f"{str(dtype).removeprefix('torch.')} with {given}",
            "fp8_e4m3 for checkpoints with KV scales",
            "start with --kv-cache-dtype fp8_e4m3: SGLang's dense attention multiplies rows of "
            "other dtypes by scales that they were never divided by",
        )
    if min(scales) <= 0:
        raise refuse("--model-path", given, "KV scales above 0", "repair the checkpoint")
    if inner not in compat.current().READS_KV_SCALES:
        raise _lost(given, inner)


def _lost(given: str, inner: str) -> ConfigError:
    fitting = sorted(compat.current().READS_KV_SCALES)
    return refuse(
        "--kv-cache-dtype",
        f"fp8_e4m3 with {given} and inner={inner}",
        f"inner={' or '.join(fitting)} for checkpoints with KV scales",
        f"set inner to {fitting[0]} in --sparse-config: sglang {compat.sglang_version()} reads "
        f"prefixes without their scales on {inner}",
    )
