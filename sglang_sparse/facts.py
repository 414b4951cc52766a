# SPDX-License-Identifier: Apache-2.0
"""The facts of a server in one record, which the banner, metrics and ``/server_info`` read."""

from dataclasses import dataclass
from typing import Any

from sglang_sparse.graph_variants import Variant


@dataclass(frozen=True)
class Facts:
    """The facts of a server, known without waiting for its device. Plain JSON types.

    Attributes:
        version: version of this package.
        method, source, preset_hash: the resolved configuration, see ``config.Resolved``.
        axes: the choice on each axis.
        inner_backend: SGLang's dense backend.
        implementation: ``triton`` or ``torch``.
        min_sparse_tokens, longest_row: fewest and most tokens of a row that is sparse.
        page_size: tokens.
        unit: tokens that are selected together.
        kv_heads, first_kv_head: KV heads of this rank, and the global id of its first.
        total_kv_heads: KV heads of the model.
        ranks: ranks of tensor parallelism that they are divided over.
        layers: global ids of this rank's layers, by their role in a sparse step.
        streaming_heads: KV heads of the model that stream, of the layers of each role.
        request_budget: range of a request's budget: ``unit``, ``least`` and ``most``.
        graphs: whether decode is captured, and which variants.
        plane_bytes: device bytes of each plane.
        plane_dtypes: element type of each plane, in the words of ``score.storage``.
        kv_cache_dtype: dtype of K and V, in the words of ``--kv-cache-dtype``.
        kv_bytes, state_bytes: bytes of K and V, where they are placed, and device bytes of lists,
            scores, plans, tables and frames.
        step_tokens: tokens that a step runs for each request: 1, or the drafts of a verification
            and the token before them.
        decode_steps, prefill_batches: numbers of planned batches, by variant.
        sglang, sglang_tested: the installed version and those that were tested.
    """

    version: str
    method: str
    source: str
    preset_hash: str
    axes: dict[str, Any]
    inner_backend: str
    implementation: str
    min_sparse_tokens: int
    longest_row: int
    page_size: int
    unit: int
    kv_heads: int
    first_kv_head: int
    total_kv_heads: int
    ranks: int
    layers: dict[str, list[int]]
    streaming_heads: dict[str, int]
    request_budget: dict[str, Any]
    graphs: dict[str, Any]
    plane_bytes: dict[str, int]
    plane_dtypes: dict[str, str]
    kv_cache_dtype: str
    kv_bytes: int
    state_bytes: int
    step_tokens: int
    decode_steps: dict[Variant, int]
    prefill_batches: dict[Variant, int]
    sglang: str
    sglang_tested: list[str]
