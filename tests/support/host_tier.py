# SPDX-License-Identifier: Apache-2.0
"""Servers whose KV goes to host memory, one a method, and one beside them that never evicts."""

import json

from sglang_sparse.config import list_presets, load_preset

# What holds a bounded number of tokens has no tier on the host.
METHODS = sorted(
    ref.name
    for ref in list_presets()
    if ref.model == "reference" and not load_preset("reference", ref.name).retention.bounded
)
VERIFY = {"SGLANG_SPARSE_VERIFY": "1"}
TILES = {"kind": "tile_topk", "fraction": 0.1, "min_tokens": 256}
# KV goes to the host whenever three prompts of a thousand tokens meet; nothing is ever dropped.
SMALL = ["--max-total-tokens", "4096", "--enable-hierarchical-cache", "--hicache-ratio", "16"]


def arguments(method: str) -> list[str]:
    """A server for prompts in several chunks, which are sparse where the method has tiles."""
    config: dict[str, object] = {"min_sparse_tokens": 64}
    if method.startswith("kascade"):
        config |= {"prefill": TILES}
    return [
        *("--attention-backend", "sparse", "--sparse-method", method),
        *("--sparse-config", json.dumps(config)),
        *("--chunked-prefill-size", "1024", "--enable-metrics"),
    ]


HOST_TIER_SERVERS = {
    **{f"host-{method}": ([*arguments(method), *SMALL], VERIFY) for method in METHODS},
    # Each rank has a host tier of its own.
    "host-ranks": ([*arguments("page_minmax"), *SMALL, "--tp", "2"], VERIFY),
    "roomy-page_minmax": (arguments("page_minmax"), VERIFY),
}
