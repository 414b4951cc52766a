# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the reference model with some heads streaming, beside as many random ones.

``python -m sglang_sparse.research.heads_study --out heads.json [--table table.md]``

Prompts are dense. While it decodes, a head that streams sees its sinks and its window, and the
other heads see everything, so that nothing but the choice of heads is measured.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_sparse.calibrate.heads_report import drawn_heads
from sglang_sparse.config import SparseConfig, StreamingHeads, load_preset
from sglang_sparse.research.arguments import show_table
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import RULER_TASKS, TASKS, FileEncoder, wilson


def streaming_heads(config: SparseConfig, kv_heads: int) -> Tensor:
    """Heads that stream, bool ``[layers, kv_heads]``; none in layers that attend to everything.

    Raises:
        ValueError: no head of ``config`` streams.
    """
    if not isinstance(config.heads, StreamingHeads):
        raise ValueError(f"no head streams: {config.heads}")
    found = torch.zeros(len(config.heads.streaming), kv_heads, dtype=torch.bool)
    for layer, heads in enumerate(config.heads.streaming):
        role = config.layers.role(layer)
        found[layer, list(heads)] = role.selects or role.source is not None
    return found


def window_of(config: SparseConfig) -> Policy:
    """What the heads that stream attend to; the current token is the last of the local ones."""
    sink, local = config.heads.window
    return Policy("window", budget=sink + local, sink=sink, recent=local)


def masks_of(config: SparseConfig, kv_heads: int, seed: int) -> dict[str, Tensor]:
    """Heads that stream in each arm, bool ``[layers, kv_heads]``: none, the preset's, random ones.

    Raises:
        ValueError: as :func:`streaming_heads`.
    """
    found = streaming_heads(config, kv_heads)
    return {"dense": torch.zeros_like(found), "found": found, **drawn_heads(found, seed)}


def measure(
    study: Study, masks: dict[str, Tensor], window: Policy, task: str, length: int
) -> dict[str, float]:
    """Share of exact replies of each arm over the same prompts; cells go into ``study.result``."""
    parts = study.prepare(task, length)
    for _, decoder in parts:
        decoder.window = window
    device, found = next(study.model.parameters()).device, {}
    for arm, mask in masks.items():
        right = study.exact(parts, Policy(), mask.to(device))
        low, high = wilson(right, study.count)
        found[arm] = right / study.count
        study.result["cells"].append(
            {"arm": arm, "task": task, "length": length, "exact": found[arm],
             "low": low, "high": high}
        )  # fmt: skip
    return found


def summary(result: dict[str, Any]) -> str:
    """A Markdown table, a row a length and arm: per cent exact of each task, and their mean."""
    tasks = list(dict.fromkeys(cell["task"] for cell in result["cells"]))
    lines = [
        f"| tokens | heads | streaming | mean | {' | '.join(tasks)} |",
        f"| ---: | --- | ---: | ---: | {' | '.join(['---:'] * len(tasks))} |",
    ]
    for length in sorted({cell["length"] for cell in result["cells"]}):
        for arm, streaming in result["streaming"].items():
            exact = {
                cell["task"]: 100 * cell["exact"]
                for cell in result["cells"]
                if (cell["length"], cell["arm"]) == (length, arm)
            }
            shares = " | ".join(f"{exact[task]:.1f}" for task in tasks)
            mean = sum(exact.values()) / len(exact)
            lines.append(f"| {length:,} | {arm} | {streaming} | {mean:.1f} | {shares} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    p.add_argument("--preset", default="lserve", help="preset of the reference model")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--table", type=Path, help="file for the table as Markdown")
    p.add_argument("--count", type=int, default=48, help="samples a cell")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    p.add_argument("--tasks", nargs="+", default=list(RULER_TASKS), choices=list(TASKS))
    args = p.parse_args()
    config = load_preset("reference", args.preset)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    masks = masks_of(config, model.config.kv_heads, args.seed)
    window = window_of(config)
    study = Study(model, FileEncoder(args.model), args.count, args.seed)
    study.result["window"] = {"sink": window.sink, "local": window.recent}
    study.result["streaming"] = {arm: int(mask.sum()) for arm, mask in masks.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out
    for length in args.lengths:
        for task in args.tasks:
            found = measure(study, masks, window, task, length)
            study.say(length=length, task=task, **found)
    show_table(summary(study.result), args.table)


if __name__ == "__main__":
    main()
