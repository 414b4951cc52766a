# SPDX-License-Identifier: Apache-2.0
"""From which length on rows are sparse, and whether a request can get that long.

A row is sparse from ``min_sparse_tokens`` tokens on. Presets begin where one GPU is no slower than
with dense attention; a rank that reads a part of the KV heads gets there with as many times the
tokens. A server whose longest request is shorter would hold planes and still attend densely, so it
does not start.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from sglang_sparse import compat
from sglang_sparse.config import ConfigError, Resolved, SparseConfig, preset_hash
from sglang_sparse.config.load import CONFIG_FLAG, METHOD_FLAG

_KEY = "min_sparse_tokens"


def for_ranks(resolved: Resolved, kv_heads: int, ranks: int) -> Resolved:
    """Let a shipped preset's ``min_sparse_tokens`` follow what one of ``ranks`` reads.

    The time that sparse attention saves is of the bytes that a rank reads, and what it costs is
    mostly launches, which no number of ranks makes fewer. A user's own number stays.

    Args:
        resolved: the configuration for one GPU.
        kv_heads: KV heads of the whole model; with more ranks, each rank has one.
        ranks: tensor-parallel ranks.
    """
    share = kv_heads // max(1, kv_heads // ranks)
    config = resolved.config
    if share == 1 or not resolved.shipped_reach or config.retention.bounded:
        return resolved
    scaled = config.model_copy(update={_KEY: share * config.min_sparse_tokens})
    source = f"{resolved.source}, {_KEY} x {share} for {ranks} ranks"
    return replace(resolved, config=scaled, source=source, hash=preset_hash(scaled))


def check_reach(resolved: Resolved, context_len: int, pool_tokens: int | None) -> None:
    """Refuse a configuration under which no row can become sparse.

    Args:
        resolved: the configuration and its source.
        context_len, pool_tokens: as in :func:`.compat.longest_row`.

    Raises:
        ConfigError: ``min_sparse_tokens`` is above the longest row.
    """
    config = resolved.config
    if config.retention.bounded:  # every row is served from its state, whatever its length
        return
    longest = compat.longest_row(context_len, pool_tokens, config.page_size)
    if config.min_sparse_tokens <= longest:
        return
    lower = _lower(resolved, _suggested(context_len, longest))
    by_context = longest == compat.longest_row(context_len, None, config.page_size)
    limit = f"context length {context_len}" if by_context else f"KV pool of {pool_tokens} tokens"
    more = "raise --context-length" if by_context else "raise --max-total-tokens or the memory"
    raise ConfigError(
        flag=METHOD_FLAG if resolved.given is None else CONFIG_FLAG,
        value=resolved.method if resolved.given is None else resolved.given,
        problem=f"its {_KEY} is {config.min_sparse_tokens} and the longest row of this server has "
        f"{max(0, longest)} tokens ({limit}), so every row would be dense",
        allowed=f"{_KEY} from 1 to {longest}" if longest > 0 else "a longer context",
        remedy=f"{lower}, {more}, or serve dense: drop --attention-backend sparse",
    )


def _suggested(context_len: int, longest: int) -> int:
    """The default threshold, or half of a context that is too short for it."""
    default: int = SparseConfig.model_fields[_KEY].default
    return max(1, min(default, context_len // 2, longest))


def _lower(resolved: Resolved, tokens: int) -> str:
    """The flag to add so that rows are sparse from ``tokens`` tokens on."""
    given, change = resolved.given, {_KEY: tokens}
    if given is None:
        return f"add {CONFIG_FLAG} {shlex.quote(json.dumps(change))}"
    if given.startswith("{"):
        merged = {**json.loads(given), **change}
        return f"use {CONFIG_FLAG} {shlex.quote(json.dumps(merged))}"
    if Path(given).is_file():
        return f"set {_KEY} to {tokens} in {given}"
    name = given.rsplit("/", 1)[-1]
    return f"use {METHOD_FLAG} {name} {CONFIG_FLAG} {shlex.quote(json.dumps(change))}"
