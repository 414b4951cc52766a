# SPDX-License-Identifier: Apache-2.0
"""KV touched at equal accuracy, a share of the mass beside a fixed budget.

``python -m sglang_sparse.reference.mass_study --out mass.json [--plots folder]``

Both rank the same blocks by the same scores; all tasks are mixed. As in PSA, section 5.2: the
smallest mean KV with which each keeps 98 % of the dense accuracy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.reference.export import load
from sglang_sparse.reference.policies import Policy
from sglang_sparse.reference.study import Study
from sglang_sparse.tasks import TASKS, FileEncoder

KEEP = 0.98
BUDGETS = (96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 1536, 2048)
EPSILONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
# Much lower than these a share is reached by the sinks alone.
WATCHED = (0.9, 0.95)


def policies(
    base: Policy, budgets: Sequence[int], epsilons: Sequence[float], length: int
) -> dict[str, Policy]:
    """Dense, fixed budgets and shares of the mass (of the smallest head and the mean), by name."""
    named = {"dense": Policy()}
    for budget in budgets:
        if budget < length:
            named[f"fixed {budget}"] = replace(base, budget=budget)
    whole = -(-2 * length // base.page) * base.page  # no cap
    for epsilon in epsilons:
        mass = replace(base, budget=whole, epsilon=epsilon)
        named[f"mass {epsilon} min"] = mass
        named[f"mass {epsilon} mean"] = replace(mass, share="mean")
    return named


class MassStudy:
    """Runs every policy on every task and finds what each kind needs.

    Attributes:
        result: JSON-ready: a row a policy with accuracy by task, KV touched by task and layer.
    """

    def __init__(self, study: Study, base: Policy) -> None:
        self.study, self.base = study, base
        self.result: dict[str, Any] = {
            "count": study.count, "seed": study.seed, "base": asdict(base), "rows": {},
        }  # fmt: skip

    def run(self, tasks: Sequence[str], lengths: Sequence[int], named: dict[str, Policy]) -> None:
        """Measure all cells; a cell is a policy, a task and a length."""
        for length in lengths:
            for task in tasks:
                parts = self.study.prepare(task, length)
                for name, policy in named.items():
                    self._cell(name, policy, task, length, parts)
                self.study.say(task=task, length=length)
        self.result["best"] = self._best()

    def _cell(self, name: str, policy: Policy, task: str, length: int, parts: list[Any]) -> None:
        watched = policy.epsilon in WATCHED and policy.share == "min"
        right, tokens, touched, shares = 0, [], [], []
        for part in parts:
            decoder = part[1]
            decoder.shares = [] if watched else None
            right += self.study.exact([part], policy)
            tokens.append(decoder.tokens[policy.dense_layers :].tolist())
            touched.append(decoder.touched.tolist())
            shares += [share.flatten() for share in decoder.shares or []]
        row = self.result["rows"].setdefault(name, {"policy": asdict(policy), "cells": []})
        cell: dict[str, Any] = {
            "task": task,
            "length": length,
            "exact": right / self.study.count,
            "tokens": mean(flat for part in tokens for flat in part),
            "touched_by_layer": [mean(column) for column in zip(*touched, strict=True)],
        }
        if shares:
            reached = torch.cat(shares)
            cell["reached_epsilon"] = float((reached >= policy.epsilon).double().mean())
            cell["least_share"] = float(reached.min())
        row["cells"].append(cell)

    def _best(self) -> dict[str, Any]:
        """The cheapest policy of each kind that keeps the accuracy, and how they compare."""
        rows = self.result["rows"]
        for row in rows.values():
            row["exact"] = mean(cell["exact"] for cell in row["cells"])
            row["tokens"] = mean(cell["tokens"] for cell in row["cells"])
        enough = KEEP * rows["dense"]["exact"]
        best: dict[str, Any] = {"dense_exact": rows["dense"]["exact"], "enough": enough}
        for kind in ("fixed", "mass"):
            fit = [
                (row["tokens"], name)
                for name, row in rows.items()
                if name.startswith(kind) and row["exact"] >= enough
            ]
            best[kind] = min(fit)[1] if fit else None
        if best["fixed"] and best["mass"]:
            best["times_less"] = rows[best["fixed"]]["tokens"] / rows[best["mass"]]["tokens"]
        return best


def mean(values: Any) -> float:
    """Arithmetic mean."""
    numbers = list(values)
    return float(sum(numbers) / len(numbers))


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy over KV touched, and KV touched by layer, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    dense = rows["dense"]["exact"]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for start, end, label in (
        ("fixed", "", "fixed budget"),
        ("mass", "min", "share of the mass, smallest head"),
        ("mass", "mean", "share of the mass, mean head"),
    ):
        chosen = [r for n, r in rows.items() if n.startswith(start) and n.endswith(end)]
        points = sorted((row["tokens"], row["exact"] / dense) for row in chosen)
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.axhline(KEEP, color="grey", linestyle=":", label=f"{KEEP:.0%} of dense")
    axes.set(xscale="log", xlabel="mean KV tokens touched by a sparse layer's head")
    axes.set(ylabel="accuracy over dense, all tasks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "mass_accuracy.png", dpi=120)

    name = result["best"]["mass"] or "mass 0.95 min"
    tasks = sorted({cell["task"] for cell in rows[name]["cells"]})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for position, task in enumerate(tasks):
        cells = [cell for cell in rows[name]["cells"] if cell["task"] == task]
        layers = [
            mean(column) for column in zip(*(c["touched_by_layer"] for c in cells), strict=True)
        ]
        at = [layer + 0.8 * (position / len(tasks) - 0.5) for layer in range(len(layers))]
        axes.bar(at, [100 * part for part in layers], width=0.8 / len(tasks), label=task)
    axes.set(xlabel="layer", ylabel="% of the KV touched", yscale="log", title=name)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / "mass_layers.png", dpi=120)


def main() -> None:
    """Run the study."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    p.add_argument("--out", type=Path, default=Path("build/mass.json"))
    p.add_argument("--plots", type=Path, help="folder for two PNG files")
    p.add_argument("--count", type=int, default=200, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lengths", type=int, nargs="+", default=[4096])
    p.add_argument("--tasks", nargs="+", default=list(TASKS))
    p.add_argument("--score", choices=["page_mean", "page_minmax"], default="page_mean")
    p.add_argument("--page", type=int, default=32, help="tokens of a block")
    p.add_argument("--sink", type=int, default=16)
    p.add_argument("--recent", type=int, default=32)
    p.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    p.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    study = Study(model, FileEncoder(args.model), args.count, args.seed)
    base = Policy(
        args.score, page=args.page, sink=args.sink, recent=args.recent, microbatch=args.page,
        dense_layers=1,
    )  # fmt: skip
    mass = MassStudy(study, base)
    mass.run(
        args.tasks, args.lengths, policies(base, args.budgets, args.epsilons, max(args.lengths))
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(mass.result) + "\n")
    if args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        draw(mass.result, args.plots)
    print(json.dumps(mass.result["best"], indent=1))


if __name__ == "__main__":
    main()
