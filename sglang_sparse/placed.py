# SPDX-License-Identifier: Apache-2.0
"""What a server refuses whose KV lies in host memory, beside what all refuse."""

import os
from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import check_rules
from sglang_sparse.config import ConfigError, Resolved
from sglang_sparse.config.load import CONFIG_FLAG
from sglang_sparse_radix.refusals import Rule

PLACED_RULES = (
    Rule("tp_size", (1, None), "KV of several ranks in host memory is not tested yet"),
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16", None), "frames in fp8 are not tested yet"),
    Rule("speculative_algorithm", (None,), "drafts are not tested with frames yet"),
    Rule("enable_hierarchical_cache", (False, None), "all KV lies in host memory already"),
    Rule("enable_memory_saver", (False, None), "released frames are not restored"),
)
_PROBE = "SGLANG_SPARSE_PROBE"


def check_placed(args: Any, resolved: Resolved) -> None:
    """Refuse flags and versions under which KV could not lie in host memory; set what it needs.

    Args:
        args: parsed flags, before ``ServerArgs``.
        resolved: the configuration; one whose KV lies on the device passes.

    Raises:
        ConfigError: names the first offending flag, variable or the version.
    """
    if not resolved.config.placement.on_host:
        return
    kind = f"placement.kind={resolved.config.placement.kind}"
    if not compat.is_tested() or not compat.current().PLACES_ON_HOST:
        raise ConfigError(
            flag=CONFIG_FLAG,
            value=kind,
            problem=f"it was not tested on sglang {compat.sglang_version()}",
            allowed=f"sglang {compat.TESTED_SGLANG[0]}",
            remedy="install that version, or drop placement",
        )
    check_rules(args, PLACED_RULES)
    if os.environ.get(_PROBE) == "1":
        raise ConfigError(
            flag=_PROBE,
            value=os.environ[_PROBE],
            problem=f"it reads KV on the device, and not with {kind}",
            allowed="unset",
            remedy=f"unset {_PROBE}",
        )
    args.prefill_max_requests = _prompts(args.prefill_max_requests)


def _prompts(asked: int | None) -> int:
    """Prompts that share a prefill batch: one, unless asked otherwise; each takes device memory."""
    if asked is None:
        return 1
    if asked < 1:
        raise ConfigError(
            flag="--prefill-max-requests",
            value=str(asked),
            problem="no prompt would run",
            allowed="1 or more",
            remedy="leave it unset for one prompt at a time",
        )
    return asked
