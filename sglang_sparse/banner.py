# SPDX-License-Identifier: Apache-2.0
"""The line that a server logs at start: method, layers, budget, memory, versions."""

from typing import Any

from sglang_sparse.facts import Facts


def text(facts: Facts) -> str:
    """The start-up banner, one line."""
    plane_bytes = sum(facts.plane_bytes.values())
    known = facts.sglang in facts.sglang_tested
    tested = f"{'tested' if known else 'NOT TESTED, tested'}: {' and '.join(facts.sglang_tested)}"
    axes = ", ".join(f"{axis} {_choice(choice)}" for axis, choice in facts.axes.items())
    layers = {role: len(ids) for role, ids in facts.layers.items()}
    dense = layers.pop("dense", 0)
    share = plane_bytes / facts.kv_bytes
    return (
        f"sglang-sparse {facts.version}: method {facts.method} ({facts.source}, "
        f"{facts.preset_hash}); {axes}; {_layers(layers)}, {dense} dense; rows of "
        f"{facts.min_sparse_tokens} to {facts.longest_row} tokens sparse, shorter ones dense; "
        f"{_drafts(facts.step_tokens)}"
        f"inner backend {facts.inner_backend}; page size {facts.page_size}; "
        f"KV in {facts.kv_cache_dtype}, "
        f"planes {plane_bytes / 2**20:.1f} MiB ({share:.1%} of KV{_sketch(facts)}), "
        f"state {facts.state_bytes / 2**20:.1f} MiB; sglang {facts.sglang} ({tested})"
    )


def _sketch(facts: Facts) -> str:
    """The element type of the sketch; nothing without one."""
    kept = facts.plane_dtypes.get("key_sketch")
    return "" if kept is None else f", sketch in {kept}"


def _drafts(tokens: int) -> str:
    """What speculation does to selection; nothing without it."""
    if tokens == 1:
        return ""
    return f"{tokens} tokens verified a step on lists that they select together; "


def _layers(roles: dict[str, int]) -> str:
    """The number of layers of each role, such as ``5 layers select``."""
    return ", ".join(f"{count} layers {role}" for role, count in roles.items())


def _choice(choice: dict[str, Any]) -> str:
    """The choice on one axis, such as ``key_sketch(channels=16)``."""
    settings = ", ".join(f"{key}={_value(v)}" for key, v in choice.items() if key != "kind")
    return f"{choice['kind']}({settings})" if settings else str(choice["kind"])


def _value(value: Any) -> str:
    """A setting in a few words, without maps and records, which ``/server_info`` shows."""
    if isinstance(value, dict):
        return "given"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} given"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"{sum(map(len, value))} in {len(value)} layers"
    return str(value)
