# SPDX-License-Identifier: Apache-2.0
"""What a server refuses whose streaming heads hold windows only, beside what all refuse."""

from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import check_rules, refuse
from sglang_sparse.config import ConfigError, Resolved
from sglang_sparse.config.load import CONFIG_FLAG
from sglang_sparse_radix.refusals import Rule

WINDOWED_RULES = (
    Rule("tp_size", (1, None), "windows of several ranks are not tested yet"),
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16", None), "windows in fp8 are not tested yet"),
    Rule("speculative_algorithm", (None,), "drafts are not tested with windows yet"),
    Rule("enable_hierarchical_cache", (False, None), "windows have no tier on the host"),
    Rule("disable_radix_cache", (False, None), "the tree says which windows are held"),
    Rule("enable_memory_saver", (False, None), "released windows are not restored"),
)
_TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def check_windowed(args: Any, resolved: Resolved) -> None:
    """Refuse flags and versions under which windows could not be kept right.

    Args:
        args: parsed flags, before ``ServerArgs``.
        resolved: the configuration; one whose heads all hold the same tokens passes.

    Raises:
        ConfigError: names the first offending flag, switch or the version.
    """
    if not resolved.config.retention.by_head:
        return
    kind = f"retention.kind={resolved.config.retention.kind}"
    if not compat.is_tested():
        raise ConfigError(
            flag=CONFIG_FLAG,
            value=kind,
            problem=f"it was not tested on sglang {compat.sglang_version()}",
            allowed=f"sglang {' or '.join(compat.TESTED_SGLANG)}",
            remedy="install that version, or drop retention",
        )
    check_rules(args, WINDOWED_RULES)
    if not args.disable_overlap_schedule:
        raise refuse(
            "--disable-overlap-schedule",
            "unset",
            f"set with {kind}",
            "add it: the tree may change where a window lies while a step reads it",
        )
    core = compat.tree_core()
    cores = compat.current().WINDOW_CORES
    if core not in cores:
        raise ConfigError(
            flag=_TREE_CORE,
            value=core,
            problem="it takes no rules for sinks",
            allowed=" or ".join(sorted(cores)),
            remedy=f"unset {_TREE_CORE}",
        )
