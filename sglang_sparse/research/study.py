# SPDX-License-Identifier: Apache-2.0
"""Measures the reference model, dense and sparse: ``python -m sglang_sparse.research.study``."""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.calibrate.files import replacing
from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.model import Attend, ReferenceModel
from sglang_sparse.research.policies import WINDOW, Kind, Policy
from sglang_sparse.tasks import (
    NEEDLE_TASKS,
    RULER_TASKS,
    TASKS,
    FileEncoder,
    Sample,
    TaskSuite,
    is_exact,
    wilson,
)
from sglang_sparse.tasks.encoding import END
from sglang_sparse.tasks.words import PARTLY_HELD_OUT, Split

SELECTORS: tuple[Kind, ...] = ("oracle", "sparcas", "page_minmax")
BUDGETS = (32, 64, 128, 256, 512)
PARTS = ("ablation", "table")


def part_rows(length: int) -> int:
    """How many samples of ``length`` tokens are decoded side by side."""
    return max(1, min(1024, 2**21 // length))


class Study:
    """Runs cells (policy, task, length) and collects them as JSON-ready rows."""

    def __init__(
        self, model: ReferenceModel, encoder: FileEncoder, count: int, seed: int,
        split: Split = "heldout",
    ) -> None:  # fmt: skip
        self.model, self.encoder = model, encoder
        self.count, self.seed = count, seed
        self.end = encoder.token_id(END)
        self.suite = TaskSuite(encoder, split)
        self.started = time.monotonic()
        self.out: Path | None = None
        self.result: dict[str, Any] = {"count": count, "seed": seed, "split": split, "cells": []}

    def prepare(
        self, task: str, length: int, count: int | None = None, prefill: Attend | None = None
    ) -> list[tuple[list[Sample], Decoder]]:
        """Samples of a cell, prefilled in parts that fit in memory; densely without ``prefill``."""
        return self.prefilled(
            self.suite.samples(task, length, count or self.count, self.seed), length, prefill
        )

    def prefilled(
        self, samples: list[Sample], length: int, prefill: Attend | None = None
    ) -> list[tuple[list[Sample], Decoder]]:
        """The same of any samples of at most ``length`` tokens."""
        rows = part_rows(length)
        parts = []
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            room = max(len(s.answer_ids) for s in part) + 4
            prompts = [s.prompt_ids for s in part]
            decoder = Decoder(self.model, prompts, room, max(1, 2**17 // length), prefill)
            parts.append((part, decoder))
        return parts

    def exact(
        self,
        parts: Iterable[tuple[list[Sample], Decoder]],
        policy: Policy,
        cut: torch.Tensor | None = None,
    ) -> int:
        """Number of exact replies under a policy."""
        return sum(sum(self.marks(samples, decoder, policy, cut)) for samples, decoder in parts)

    def marks(
        self,
        samples: list[Sample],
        decoder: Decoder,
        policy: Policy,
        cut: torch.Tensor | None = None,
    ) -> list[bool]:
        """Which replies are exact."""
        replies = decoder.generate(policy, self.end, cut)
        return [is_exact(s, self.encoder.decode(r)) for s, r in zip(samples, replies, strict=True)]

    def cell(
        self, task: str, length: int, parts: Any, policy: Policy, **labels: Any
    ) -> dict[str, Any]:
        """Measure and record one cell, with ``labels`` beside what it measures."""
        right = self.exact(parts, policy)
        return self.record(task, length, parts, asdict(policy), right, **labels)

    def record(
        self, task: str, length: int, parts: Any, policy: dict[str, Any], right: int, **labels: Any
    ) -> dict[str, Any]:
        """Record a cell of ``right`` exact replies; ``policy`` says what was measured."""
        count = sum(len(samples) for samples, _ in parts)
        low, high = wilson(right, count)
        row = {
            "task": task, "length": length, "policy": policy, "count": count,
            "exact": right / count, "low": low, "high": high, **labels,
        }  # fmt: skip
        self.result["cells"].append(row)
        return row

    def table(self, length: int, tasks: Sequence[str], policies: Sequence[Policy]) -> None:
        """Every policy on every task."""
        for task in tasks:
            prepared = self.prepare(task, length)
            rows = [self.cell(task, length, prepared, p) for p in policies]
            self.say(task=task, length=length, exact=[row["exact"] for row in rows])

    def ablation(self, length: int, tasks: Sequence[str], count: int) -> None:
        """Cut each layer, and each KV head, to the window alone."""
        c = self.model.config
        device = next(self.model.parameters()).device
        result: dict[str, Any] = {"length": length, "count": count, "tasks": {}}
        self.result["ablation"] = result
        for task in tasks:
            parts = self.prepare(task, length, count)

            def run(cut: torch.Tensor, parts: Any = parts) -> float:
                return self.exact(parts, Policy(), cut) / count

            none = torch.zeros(c.layers, c.kv_heads, dtype=torch.bool, device=device)
            layers: list[float] = []
            heads: list[list[float]] = []
            dense = run(none)
            for layer in range(c.layers):
                cut = none.clone()
                cut[layer] = True
                layers.append(run(cut))
                heads.append([])
                for head in range(c.kv_heads):
                    cut = none.clone()
                    cut[layer, head] = True
                    heads[-1].append(run(cut))
            result["tasks"][task] = {"dense": dense, "layers": layers, "heads": heads}
            self.say(ablation=task, dense=dense, layers=layers, heads=heads)

    def say(self, **entry: Any) -> None:
        """One JSON line of progress; what is there so far goes to the file."""
        if self.out is not None:
            with replacing(self.out) as draft:
                draft.write_text(json.dumps(self.result))
        print(
            json.dumps({"seconds": round(time.monotonic() - self.started, 1), **entry}), flush=True
        )


def at_budget(kind: Kind, budget: int) -> Policy:
    """A selector at a budget, of which at most a quarter are sinks, and half recent tokens."""
    return Policy(kind, budget, sink=min(16, budget // 4), recent=min(32, budget // 2))


def policies(budgets: Sequence[int], selectors: Sequence[Kind]) -> list[Policy]:
    """Dense, the window, and every selector at every budget."""
    return [Policy(), WINDOW, *(at_budget(kind, b) for b in budgets for kind in selectors)]


def parser() -> argparse.ArgumentParser:
    """The command line."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(n) for n in names(text)]

    p = study_parser(__doc__, "build/study.json")
    p.add_argument("--count", type=int, default=200, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--split", choices=("heldout", *PARTLY_HELD_OUT), default="heldout",
        help="what samples have that no training row had: words, forms, or both",
    )  # fmt: skip
    p.add_argument("--lengths", type=numbers, default=[4096, 8192, 16384])
    p.add_argument("--tasks", type=names, default=list(RULER_TASKS))
    p.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="0 for none")
    p.add_argument("--selectors", type=names, default=list(SELECTORS))
    p.add_argument("--parts", type=names, default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    return p


def main() -> None:
    """Run the study."""
    args = parser().parse_args()
    for name, known in (("parts", PARTS), ("tasks", TASKS), ("selectors", SELECTORS)):
        if unknown := set(getattr(args, name)) - set(known):
            raise SystemExit(f"unknown {name} {sorted(unknown)}; allowed: {', '.join(known)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    study = Study(model, FileEncoder(args.model), args.count, args.seed, args.split)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out
    if "ablation" in args.parts:
        study.ablation(args.lengths[0], NEEDLE_TASKS, args.count)
    if "table" in args.parts:
        budgets = [b for b in args.budgets if b]
        chosen = policies(budgets, args.selectors)
        for length in args.lengths:
            study.table(length, args.tasks, chosen)


if __name__ == "__main__":
    main()
