# SPDX-License-Identifier: Apache-2.0
"""Servers with the same selections, KV on the device and on the host; starts that are refused."""

import json

from sglang_sparse import compat

PSA = ["--attention-backend", "sparse", "--sparse-method", "psa"]
PAGES_OF_16 = {
    # Two of six layers select; the others' blocks are fetched ahead.
    "layers": {"kind": "anchors", "anchors": [0, 2], "first": "selection"},
    "score": {"logical_page": 16},
    "budget": {"epsilon": 0.9, "max_epsilon": 1.0, "cap": 128, "microbatch": 16},
    "min_sparse_tokens": 33,
    "page_size": 16,
}
# Few frames: two thirds of the blocks that the host has.
ON_HOST = {"kind": "host", "device_bytes": 18_500_000, "host_bytes": 64 << 20}
PLACEMENTS: dict[str, dict[str, object]] = {"device": {}, "host": {"placement": ON_HOST}}

# A pool that three requests overfill, and prefill batches of up to two prompts.
PLACED_SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    f"placed-on-{where}": (
        [
            *(*PSA, "--sparse-config", json.dumps(PAGES_OF_16 | placement)),
            *("--chunked-prefill-size", "512", "--max-total-tokens", "1024"),
            *("--max-running-requests", "3", "--prefill-max-requests", "2"),
            *("--schedule-conservativeness", "0.01", "--context-length", "1024"),
            *("--enable-metrics", "--enable-cache-report"),
        ],
        {"SGLANG_SPARSE_VERIFY": "1"},
    )
    for where, placement in PLACEMENTS.items()
}

UNSIZED = PAGES_OF_16 | {"placement": {"kind": "host", "host_bytes": 64 << 20}}
PLACED_SERVERS["placed-unsized"] = (
    [*PSA, "--sparse-config", json.dumps(UNSIZED), "--max-running-requests", "2"],
    {},
)


def sized(**room: int) -> list[str]:
    """Arguments of a server with other room."""
    return [*PSA, "--sparse-config", json.dumps(PAGES_OF_16 | {"placement": ON_HOST | room})]


# Arguments, and words of the line that ends the start.
PLACED_REFUSALS: dict[str, tuple[list[str], list[str]]] = {
    "dense layers with KV in host memory": (
        [*PSA, "--sparse-config", json.dumps({"placement": ON_HOST})],
        ["--sparse-config", "layer 0 attends to every token", "layers.kind every"],
    ),
    "ranks with KV in host memory": (
        [*PSA, "--sparse-config", json.dumps(PAGES_OF_16 | PLACEMENTS["host"]), "--tp-size", "2"],
        ["not tested"],
    ),
}
# Before a model is loaded; other versions are refused by name.
SIZES: dict[str, tuple[list[str], list[str]]] = {
    "host memory that no machine has": (
        sized(host_bytes=1 << 60),
        [f"placement.host_bytes={1 << 60}", "the free memory of this host"],
    ),
    "host memory for less than a page": (
        sized(host_bytes=100),
        ["placement.host_bytes=100", "no page"],
    ),
    "more beside host memory than one memory has": (
        sized(device_bytes=1 << 60),
        [f"placement.device_bytes={1 << 60}", "there without a model"],
    ),
}
PLACED_REFUSALS |= SIZES if compat.current().PLACES_ON_HOST else {}
