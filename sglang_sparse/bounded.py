# SPDX-License-Identifier: Apache-2.0
"""What a server that holds a bounded number of tokens a request refuses beside what all refuse."""

from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import check_rules, refuse
from sglang_sparse.config import ConfigError
from sglang_sparse.config.load import METHOD_FLAG, Resolved
from sglang_sparse_radix.refusals import Rule

BOUNDED_RULES = (
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16", None), "states hold keys as they are"),
    Rule("speculative_algorithm", (None,), "rejected tokens cannot be taken out of a state"),
    Rule("enable_hierarchical_cache", (False, None), "states have no tier on the host"),
    Rule("enable_memory_saver", (False, None), "released states are not restored"),
    Rule(
        "schedule_policy",
        ("fcfs", "lpm", "lof", "random", "routing-key", "priority", None),
        "states of prefixes form no tree that could be weighed",
    ),
)


def check_bounded(args: Any, resolved: Resolved) -> None:
    """Refuse flags and versions under which states could not be kept right.

    Args:
        args: parsed flags, before ``ServerArgs``.
        resolved: the configuration; one that holds every token passes.

    Raises:
        ConfigError: names the first offending flag, or the version.
    """
    if not resolved.config.retention.bounded:
        return
    if not compat.is_tested():
        raise ConfigError(
            flag=METHOD_FLAG,
            value=resolved.method,
            problem=f"its states were not tested on sglang {compat.sglang_version()}",
            allowed=f"sglang {' or '.join(compat.TESTED_SGLANG)}",
            remedy="install a tested version, or use another method",
        )
    shares = resolved.config.retention.kept_prefixes > 0
    if shares and not compat.current().SHARES_STATES:
        raise ConfigError(
            flag="--sparse-config",
            value=f"retention.snapshots={resolved.config.retention.kept_prefixes}",
            problem=f"sglang {compat.sglang_version()} has no cache to share states by",
            allowed=f"0, or sglang {compat.TESTED_SGLANG[0]}",
            remedy="set it to 0 and add --disable-radix-cache, or install that version",
        )
    if args.disable_radix_cache is shares:
        raise refuse(
            "--disable-radix-cache",
            "set" if shares else "unset",
            "unset if retention.snapshots is above 0, and set otherwise",
            "drop --disable-radix-cache, or set retention.snapshots to 0"
            if shares
            else "add --disable-radix-cache, or set retention.snapshots to share prefixes",
        )
    check_rules(args, BOUNDED_RULES)
