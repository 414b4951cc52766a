# SPDX-License-Identifier: Apache-2.0
"""What runs, said once at start and on request: method, layers, budget, memory, versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse import __version__, compat
from sglang_sparse.graph_variants import VARIANTS

if TYPE_CHECKING:
    from sglang_sparse.backend.attention import SparseAttentionBackend


_AXES = ("layers", "score", "budget", "heads", "cadence", "retention", "prefill")


def facts(backend: SparseAttentionBackend) -> dict[str, Any]:
    """Everything the banner and ``/server_info`` say, as plain JSON types."""
    config, pool = backend.config, backend.token_to_kv_pool
    roles: dict[str, list[int]] = {}
    for layer, role in backend.roles().items():
        roles.setdefault(role, []).append(layer)
    low, high = config.request_range
    planes = {name: plane.nbytes for name, plane in pool.planes.tensors().items()}
    axes = config.model_dump(mode="json", include=set(_AXES))
    return {
        "version": __version__,
        "method": backend.launch.resolved.method,
        "source": backend.launch.resolved.source,
        "preset_hash": backend.launch.resolved.hash,
        "axes": {axis: axes[axis] for axis in _AXES},
        "inner_backend": backend.inner_name,
        "implementation": backend.impl,
        "min_sparse_tokens": config.min_sparse_tokens,
        "page_size": pool.page_size,
        "layers": roles,
        "request_budget": {"unit": config.budget.key, "least": low, "most": high},
        "graphs": {
            "decode": "captured" if backend.captures_graphs else "off",
            "variants": list(VARIANTS) if backend.captures_graphs else [],
        },
        "plane_bytes": planes,
        "kv_bytes": sum(pool.get_kv_size_bytes()) - pool.plane_bytes(),
        "state_bytes": backend.state_bytes(),
        "decode_steps": dict(backend.steps),
        "prefill_batches": dict(backend.prefills),
        "progress": None if backend.progressive is None else backend.progressive.report(),
        "fidelity": None if backend.probe is None else backend.probe.report(),
        "sglang": compat.sglang_version(),
        "sglang_tested": compat.tested_range(),
    }


def text(backend: SparseAttentionBackend) -> str:
    """The start-up banner, one line."""
    f = facts(backend)
    plane_bytes = sum(f["plane_bytes"].values())
    tested = (
        "tested"
        if f["sglang"] in compat.TESTED_SGLANG
        else f"NOT TESTED, tested: {f['sglang_tested']}"
    )
    axes = ", ".join(f"{axis} {_choice(choice)}" for axis, choice in f["axes"].items())
    layers = {role: len(ids) for role, ids in f["layers"].items()}
    dense = layers.pop("dense", 0)
    share = plane_bytes / f["kv_bytes"]
    return (
        f"sglang-sparse {f['version']}: method {f['method']} ({f['source']}, {f['preset_hash']}); "
        f"{axes}; {_layers(layers)}, {dense} dense; rows under "
        f"{f['min_sparse_tokens']} tokens dense; inner backend {f['inner_backend']}; page size "
        f"{f['page_size']}; planes {plane_bytes / 2**20:.1f} MiB ({share:.1%} of KV), "
        f"state {f['state_bytes'] / 2**20:.1f} MiB; sglang {f['sglang']} ({tested})"
    )


def _layers(roles: dict[str, int]) -> str:
    """``5 layers select``, and so on for every role."""
    return ", ".join(f"{count} layers {role}" for role, count in roles.items())


def _choice(choice: dict[str, Any]) -> str:
    """``key_sketch(channels=16)`` of one axis."""
    settings = ", ".join(f"{key}={_value(v)}" for key, v in choice.items() if key != "kind")
    return f"{choice['kind']}({settings})" if settings else str(choice["kind"])


def _value(value: Any) -> str:
    """A setting in a few words: maps and records are in ``/server_info``, not in a log line."""
    if isinstance(value, dict):
        return "given"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} given"
    return str(value)
