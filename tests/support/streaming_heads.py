# SPDX-License-Identifier: Apache-2.0
"""Heads of the reference model that stream where a test says so."""

from typing import Any

from sglang_sparse import compat

# Half of the KV heads stream, no two layers alike; the dense layer's cannot.
STREAMING: dict[str, Any] = {
    "kind": "streaming",
    "sink": 64,
    "local": 128,
    "streaming": [[0, 1], [0, 2], [1, 3], [], [0, 1, 2, 3], [2, 3]],
}
# As many in each layer, as one pool of windows for all layers needs.
EQUALLY_STREAMING: dict[str, Any] = {
    "layers": {"kind": "every"},
    "heads": STREAMING | {"streaming": [[0, 1], [0, 2], [1, 3], [2, 3], [0, 3], [1, 2]]},
}
# A chunk of the servers that have these heads, and whether a prompt waits for room for one.
CHUNK = 512 if compat.current().WAITS_FOR_WHOLE_CHUNKS else 0
# Tokens that streaming heads hold of one request at most, in pages of 64.
WINDOW_TOKENS = 960 if CHUNK else 704
