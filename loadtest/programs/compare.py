# SPDX-License-Identifier: Apache-2.0
"""Run both programs against a dense and a sparse server, and compare.

    python loadtest/programs/compare.py --dense http://127.0.0.1:30000 \\
        --sparse http://127.0.0.1:30001 --out programs.json

It compares the answers and the cached tokens of each call: a sparse server must share prefixes as
well as a dense one. The default markers around the question are those of the reference model; give
your model's with `--before` and `--after`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import fork_document
import tree_of_thought
from client import server_url

BEFORE, AFTER = "<|bos|><|user|>", "<|end|><|assistant|>"


def compare(dense: dict[str, Any], sparse: dict[str, Any]) -> dict[str, Any]:
    """Both runs of a program, and how far they agree."""
    same = [a == b for a, b in zip(dense["answers"], sparse["answers"], strict=True)]
    return {
        "calls": len(same),
        "same_answers": sum(same),
        "dense_cached_tokens": sum(dense["cached_tokens"]),
        "sparse_cached_tokens": sum(sparse["cached_tokens"]),
        "dense": dense,
        "sparse": sparse,
    }


def run(
    dense: str, sparse: str, *, repeats: int, before: str = BEFORE, after: str = AFTER
) -> dict[str, Any]:
    """Both programs on both servers."""
    document = fork_document.make_document(repeats, facts=6, seed=7)
    name = next(iter(document.facts))
    question = f"What is the magic number for {name}?"
    forks = [fork_document.run(url, document, before, after) for url in (dense, sparse)]
    trees = [
        tree_of_thought.run(url, document.text, question, before, after) for url in (dense, sparse)
    ]
    return {"fork_document": compare(*forks), "tree_of_thought": compare(*trees)}


def show(found: dict[str, Any]) -> None:
    """Print a line a program."""
    for name, result in found.items():
        right = [result[kind].get("right") for kind in ("dense", "sparse")]
        print(
            f"{name}: {result['same_answers']} of {result['calls']} answers the same"
            + ("" if right[0] is None else f", right: dense {right[0]}, sparse {right[1]}")
            + f", cached tokens: dense {result['dense_cached_tokens']}, "
            f"sparse {result['sparse_cached_tokens']}"
        )


def main() -> None:
    """Compare, print a table, write everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dense", type=server_url, required=True, help="a dense server")
    parser.add_argument("--sparse", type=server_url, required=True, help="a sparse server")
    parser.add_argument("--repeats", type=int, default=100, help="of the filler; 22 words each")
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--after", default=AFTER)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = run(args.dense, args.sparse, repeats=args.repeats, before=args.before, after=args.after)
    show(found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
