# SPDX-License-Identifier: Apache-2.0
"""Which speculative decoding is served: chains of SGLang's n-grams, of a draft model, or of EAGLE.

The rows of a chain that are accepted are the first ones, and lie where they belong. The first row
that is not accepted is written again, in the same slot, by the next step. So a page is complete
only when all of its rows are accepted ones, and then its planes were last computed from these. The
accepted rows of a tree are moved after verification, and the planes would not follow.
"""

from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import BACKEND, refuse
from sglang_sparse.config import SparseConfig

_EAGLE = ("EAGLE", "EAGLE3")
ALGORITHMS = ("NGRAM", "STANDALONE", *_EAGLE)
_TREES = "accepted rows of a tree are moved after verification, and planes do not follow"


def algorithm(args: Any) -> str | None:
    """Name of the speculative algorithm in capitals, as SGLang reads it; None without one."""
    name = getattr(args, "speculative_algorithm", None)
    return None if name is None else str(name).upper()


def check_speculation(args: Any, config: SparseConfig) -> None:
    """Refuse speculation that planes or lists could not follow.

    Args:
        args: flags, before or after SGLang resolves them.
        config: the resolved configuration.

    Raises:
        ConfigError: names the flag.
    """
    name = algorithm(args)
    if name is None:
        return
    known = ALGORITHMS if compat.is_tested() else ()
    if name not in known:
        why = f"others are not supported with sglang {compat.sglang_version()}"
        if name == "NEXTN" and known:
            why = "layers of the served model that draft are not tested"
        raise refuse(
            "--speculative-algorithm",
            name,
            " or ".join((*known, "unset")),
            f"start without it: {why}",
        )
    if name in ("STANDALONE", *_EAGLE) and args.speculative_draft_model_path is None:
        raise refuse(
            "--speculative-draft-model-path",
            "unset",
            "a draft model that was trained for the one that is served"
            if name in _EAGLE
            else "a model with the vocabulary of the one that is served",
            "name the model that drafts",
        )
    if name in _EAGLE:
        _check_chain(args, name)
    if not config.budget.verifies:
        raise refuse(
            "--speculative-algorithm",
            f"{name} with budget.kind={config.budget.kind}",
            "budgets that draft tokens can share: tokens or fraction",
            "choose another method, or drop it: where a row stops follows from one query",
        )
    if name == "NGRAM" and args.speculative_ngram_max_bfs_breadth != 1:
        raise refuse(
            "--speculative-ngram-max-bfs-breadth",
            args.speculative_ngram_max_bfs_breadth,
            "1",
            f"set it to 1: {_TREES}",
        )
    if str(args.kv_cache_dtype).startswith("fp8"):
        raise refuse(
            "--kv-cache-dtype",
            f"{args.kv_cache_dtype} with --speculative-algorithm {name}",
            "auto or bfloat16 with speculation",
            "drop one of them: fp8 KV is not tested with draft tokens",
        )
    if getattr(args, "enable_hierarchical_cache", False):
        raise refuse(
            "--enable-hierarchical-cache",
            f"with --speculative-algorithm {name}",
            "unset with speculation",
            "drop one of them: KV in host memory is not tested with draft tokens",
        )
    if args.speculative_draft_attention_backend == BACKEND:
        raise refuse(
            "--speculative-draft-attention-backend",
            BACKEND,
            "a dense backend of SGLang, or unset",
            "drop it: draft models attend densely",
        )


def _check_chain(args: Any, name: str) -> None:
    """Refuse lengths of drafts that SGLang would choose: for some models these are trees."""
    if args.speculative_eagle_topk != 1:
        raise refuse(
            "--speculative-eagle-topk",
            "unset" if args.speculative_eagle_topk is None else args.speculative_eagle_topk,
            f"1 with --speculative-algorithm {name}",
            f"set it to 1: {_TREES}",
        )
    if args.speculative_num_steps is None:
        raise refuse(
            "--speculative-num-steps",
            "unset",
            "a number of drafts, with --speculative-eagle-topk",
            "set it, to 3 for example",
        )
