# SPDX-License-Identifier: Apache-2.0
"""Measures the reference model, dense and sparse: ``python -m sglang_sparse.reference.study``."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_sparse.reference.decode import Decoder
from sglang_sparse.reference.export import load
from sglang_sparse.reference.model import ReferenceModel
from sglang_sparse.reference.policies import WINDOW, Kind, Policy
from sglang_sparse.tasks import NEEDLE_TASKS, TASKS, FileEncoder, Sample, TaskSuite, is_exact
from sglang_sparse.tasks.encoding import END

SELECTORS: tuple[Kind, ...] = ("oracle", "sparcas", "page_minmax")
BUDGETS = (64, 128, 256, 512, 1024)
RETRIEVAL = (*NEEDLE_TASKS, "passkey", "variable_tracking")
PARTS = ("text", "dense", "ablation", "budgets", "variants")


def wilson(successes: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % Wilson interval of a proportion."""
    if count == 0:
        return 0.0, 1.0
    p = successes / count
    scale = 1 + z * z / count
    centre = (p + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


class Study:
    """Runs cells (policy, task, length) and collects them as JSON-ready rows."""

    def __init__(self, model: ReferenceModel, encoder: FileEncoder, count: int, seed: int) -> None:
        self.model, self.encoder = model, encoder
        self.count, self.seed = count, seed
        self.end = encoder.token_id(END)
        self.suite = TaskSuite(encoder, "heldout")
        self.started = time.monotonic()
        self.out: Path | None = None
        self.result: dict[str, Any] = {"count": count, "seed": seed, "cells": []}

    def prepare(
        self, task: str, length: int, count: int | None = None
    ) -> list[tuple[list[Sample], Decoder]]:
        """Samples of a cell, prefilled in parts that fit in memory."""
        samples = self.suite.samples(task, length, count or self.count, self.seed)
        rows = max(1, min(256, 2**21 // length))
        parts = []
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            room = max(len(s.answer_ids) for s in part) + 4
            prompts = [s.prompt_ids for s in part]
            parts.append((part, Decoder(self.model, prompts, room, max(1, 2**17 // length))))
        return parts

    def exact(
        self,
        parts: Iterable[tuple[list[Sample], Decoder]],
        policy: Policy,
        cut: torch.Tensor | None = None,
    ) -> int:
        """Number of exact replies under a policy."""
        right = 0
        for samples, decoder in parts:
            replies = decoder.generate(policy, self.end, cut)
            right += sum(
                is_exact(s, self.encoder.decode(r)) for s, r in zip(samples, replies, strict=True)
            )
        return right

    def cell(self, task: str, length: int, parts: Any, policy: Policy, part: str) -> dict[str, Any]:
        """Measure and record one cell."""
        count = sum(len(samples) for samples, _ in parts)
        right = self.exact(parts, policy)
        low, high = wilson(right, count)
        row = {
            "part": part, "task": task, "length": length, "policy": asdict(policy), "count": count,
            "exact": right / count, "low": low, "high": high,
        }  # fmt: skip
        self.result["cells"].append(row)
        return row

    def table(self, lengths: Sequence[int], parts: Sequence[str]) -> None:
        """Dense, window and every budget on the retrieval tasks; dense alone on the word tasks."""
        for length in lengths:
            for task in TASKS:
                prepared = self.prepare(task, length)
                policies = [Policy()]
                if task in RETRIEVAL:
                    policies.append(WINDOW)
                    if "budgets" in parts and length <= 8192:
                        policies += [
                            Policy(kind, budget) for budget in BUDGETS for kind in SELECTORS
                        ]
                    elif "budgets" in parts:
                        policies += [Policy(kind, 256) for kind in SELECTORS]
                    if "variants" in parts and length == min(lengths):
                        policies += [
                            Policy("sparcas", budget, reduce=how, dense_layers=first)
                            for budget in (64, 128, 256)
                            for how in ("max", "sum")
                            for first in (0, 1, 2)
                            if (how, first) != ("max", 0)
                        ]
                    if "variants" in parts and length == min(lengths):
                        policies += [Policy("page_minmax", b, reduce="sum") for b in (64, 128, 256)]
                rows = [self.cell(task, length, prepared, p, "table") for p in policies]
                self.say(task=task, length=length, dense=rows[0]["exact"], rows=len(rows))

    def ablation(self, length: int, tasks: Sequence[str], count: int) -> None:
        """Cut each layer, and each KV head, to the window alone."""
        c = self.model.config
        device = next(self.model.parameters()).device
        result: dict[str, Any] = {"length": length, "count": count, "tasks": {}}
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
        self.result["ablation"] = result

    def text(self, tokens: int, count: int) -> None:
        """Perplexity on held-out text."""
        total, seen, size = 0.0, 0, 0
        device = next(self.model.parameters()).device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.no_grad():
            for ids in self.suite.heldout_text(tokens, count):
                row = torch.tensor([ids], device=device)
                logits = self.model.logits(self.model(row, dtype))[0, :-1].float()
                total += float(F.cross_entropy(logits, row[0, 1:], reduction="sum"))
                seen += len(ids) - 1
                size += len(self.encoder.decode(ids[1:]).encode())
        self.result["text"] = {
            "tokens": seen, "context": tokens, "perplexity": math.exp(total / seen),
            "bits_per_byte": total / math.log(2) / size,
        }  # fmt: skip
        self.say(**self.result["text"])

    def say(self, **entry: Any) -> None:
        """One JSON line of progress; what is there so far goes to the file."""
        if self.out is not None:
            self.out.write_text(json.dumps(self.result))
        print(
            json.dumps({"seconds": round(time.monotonic() - self.started, 1), **entry}), flush=True
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    p.add_argument("--out", type=Path, default=Path("build/study.json"))
    p.add_argument("--count", type=int, default=200, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lengths", default="4096,8192,16384")
    p.add_argument("--parts", default=",".join(PARTS), help=f"any of {', '.join(PARTS)}")
    return p


def main() -> None:
    """Run the study."""
    args = parser().parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"unknown part {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    lengths = [int(n) for n in args.lengths.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = Study(
        load(args.model).to(device).eval(), FileEncoder(args.model), args.count, args.seed
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out

    def save() -> None:
        args.out.write_text(json.dumps(study.result))

    if "text" in parts:
        study.text(2048, max(args.count // 4, 1))
        save()
    if "ablation" in parts:
        study.ablation(lengths[0], NEEDLE_TASKS, args.count)
        save()
    if "dense" in parts or "budgets" in parts:
        for length in lengths:
            study.table(
                [length], parts if length == lengths[0] else [p for p in parts if p != "variants"]
            )
            save()


if __name__ == "__main__":
    main()
