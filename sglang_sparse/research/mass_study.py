# SPDX-License-Identifier: Apache-2.0
"""KV that is read at equal accuracy: a share of the mass compared with a fixed budget.

``python -m sglang_sparse.research.mass_study --out mass.json [--plots folder]``

Both rank the same blocks or tokens by the same scores, and all tasks and lengths are mixed. As in
PSA, section 5.2, the result is the smallest mean KV that keeps 98 % of the dense accuracy. One
criterion asks this of the mean accuracy, the other of every task (section 5.1 evaluates accuracy on
each data set). Cells that ``--out`` already holds are not measured again. ``--join`` adds the cells
of other files, so that lengths can be measured side by side.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.study import Study, part_rows
from sglang_sparse.tasks import RULER_TASKS, FileEncoder

KEEP = 0.98
BUDGETS = (96, 112, 128, 144, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
EPSILONS = (0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
CAP, MARGIN = 768, 6.0
WATCHED = (0.9, 0.95)  # epsilons of which the share truly reached is measured
CRITERIA = ("mixed", "each_task")


def policies(
    base: Policy,
    budgets: Sequence[int],
    scored: Sequence[float],
    observed: Sequence[float],
    cap: int,
    margin: float,
) -> dict[str, Policy]:
    """Dense, fixed budgets, and shares of the mass by either estimator, by name."""
    named = {"dense": Policy()}
    for budget in budgets:
        named[f"fixed {budget}"] = replace(base, budget=budget)
    for epsilon in scored:
        mass = replace(base, budget=cap, epsilon=epsilon, margin=margin)
        named[f"mass {epsilon} scored"] = mass
    for epsilon in observed:
        named[f"mass {epsilon} observed_min"] = replace(base, budget=cap, epsilon=epsilon)
    return named


class MassStudy:
    """Runs every policy on every task and length, and finds the cheapest policy of each kind.

    Attributes:
        result: JSON-ready: a row a policy, with a cell for each task and length. A row's policy is
            what differs from the study's ``base``.
    """

    def __init__(self, study: Study, base: Policy, out: Path) -> None:
        """Continue from ``out`` if it exists.

        Raises:
            ValueError: ``out`` holds another study.
        """
        self.study, self.out = study, out
        self.result: dict[str, Any] = {
            "count": study.count, "seed": study.seed, "base": asdict(base), "rows": {},
        }  # fmt: skip
        if out.exists():
            self.join(json.loads(out.read_text()))

    def join(self, other: dict[str, Any]) -> None:
        """Take the cells of another result; ValueError if it is of another study."""
        for key in ("count", "seed", "base"):
            ours, theirs = (json.loads(json.dumps(r[key])) for r in (self.result, other))
            if ours != theirs:
                raise ValueError(f"cannot join results of {key} {theirs} to those of {ours}")
        for name, theirs in other["rows"].items():
            row = self.result["rows"].setdefault(name, {"policy": theirs["policy"], "cells": []})
            have = {(cell["task"], cell["length"]) for cell in row["cells"]}
            row["cells"] += [c for c in theirs["cells"] if (c["task"], c["length"]) not in have]

    def _changes(self, policy: Policy) -> dict[str, Any]:
        base = self.result["base"]
        return {key: value for key, value in asdict(policy).items() if base[key] != value}

    def run(self, tasks: Sequence[str], lengths: Sequence[int], named: dict[str, Policy]) -> None:
        """Measure the cells that are missing; a cell is a policy, a task and a length.

        A policy answers several tasks side by side, as many as fit in one part.
        """
        for length in lengths:
            side = max(1, part_rows(length) // self.study.count)
            for start in range(0, len(tasks), side):
                self._measure(tasks[start : start + side], length, named)

    def _measure(self, tasks: Sequence[str], length: int, named: dict[str, Policy]) -> None:
        rows, study, missing = self.result["rows"], self.study, {}
        for name, policy in named.items():
            row = rows.setdefault(name, {"policy": self._changes(policy), "cells": []})
            have = [(cell["task"], cell["length"]) for cell in row["cells"]]
            if absent := [task for task in tasks if (task, length) not in have]:
                missing[name] = absent
        if not missing:
            return
        samples = [
            sample
            for task in tasks
            for sample in study.suite.samples(task, length, study.count, study.seed)
        ]
        parts = study.prefilled(samples, length)
        for name, absent in missing.items():
            cells = self._cells(named[name], tasks, length, parts)
            rows[name]["cells"] += [cell for cell in cells if cell["task"] in absent]
            self.save()
        study.say(length=length, tasks=list(tasks))

    def save(self) -> None:
        """Write the results so far."""
        self.out.write_text(json.dumps(self.result) + "\n")

    def _cells(
        self, policy: Policy, tasks: Sequence[str], length: int, parts: list[Any]
    ) -> list[dict[str, Any]]:
        right: dict[str, list[bool]] = {task: [] for task in tasks}
        tokens: dict[str, list[torch.Tensor]] = {task: [] for task in tasks}
        shares: dict[str, list[torch.Tensor]] = {task: [] for task in tasks}
        for samples, decoder in parts:
            decoder.shares = [] if policy.epsilon in WATCHED else None
            marks = self.study.marks(samples, decoder, policy)
            names = [sample.task for sample in samples]
            for name, mark in zip(names, marks, strict=True):
                right[name].append(mark)
            for task in set(names):
                chosen = torch.tensor([name == task for name in names])
                tokens[task].append(decoder.row_tokens.cpu()[:, chosen])
                if decoder.shares:
                    smallest = torch.stack(decoder.shares).amin(-1).cpu()  # of each group's heads
                    shares[task].append(smallest[:, chosen].flatten())
        cells = []
        for task in tasks:
            cell: dict[str, Any] = {
                "task": task,
                "length": length,
                "exact": mean(right[task]),
                "tokens_by_layer": torch.cat(tokens[task], 1).mean(1).tolist(),
            }
            if shares[task]:
                reached = torch.cat(shares[task])
                cell["reached_epsilon"] = float((reached >= policy.epsilon).double().mean())
                cell["least_share"] = float(reached.min())
            cells.append(cell)
        return cells

    def conclude(self) -> dict[str, Any]:
        """The cheapest policy of each kind that keeps the accuracy, and how they compare.

        Tokens are those of the layers that are sparse, or, ``over_all_layers``, of every layer.
        """
        whole = self.result["rows"]["dense"]["cells"]
        rows = {n: r for n, r in self.result["rows"].items() if len(r["cells"]) == len(whole)}
        first = self.result["base"]["dense_layers"]
        for row in rows.values():
            layers = [
                mean(c) for c in zip(*(x["tokens_by_layer"] for x in row["cells"]), strict=True)
            ]
            row["tokens"], row["tokens_over_all_layers"] = mean(layers[first:]), mean(layers)
            tasks = sorted({cell["task"] for cell in row["cells"]})
            row["exact_by_task"] = {
                task: mean(c["exact"] for c in row["cells"] if c["task"] == task) for task in tasks
            }
            row["exact"] = mean(cell["exact"] for cell in row["cells"])
            dense = rows["dense"]["exact_by_task"]
            smallest = min(
                row["exact_by_task"][task] / dense[task] for task in tasks if dense[task]
            )
            row["kept"] = {"mixed": row["exact"] / rows["dense"]["exact"], "each_task": smallest}
        self.result["best"] = {criterion: cheapest(rows, criterion) for criterion in CRITERIA}
        best: dict[str, Any] = self.result["best"]
        return best


def cheapest(rows: dict[str, Any], criterion: str) -> dict[str, Any]:
    """The cheapest fixed budget and share of the mass that keep enough, by ``criterion``."""
    best: dict[str, Any] = {}
    for kind in ("fixed", "mass"):
        fit = [
            (row["tokens"], name)
            for name, row in rows.items()
            if name.startswith(kind) and row["kept"][criterion] >= KEEP
        ]
        best[kind] = min(fit)[1] if fit else None
    if best["fixed"] and best["mass"]:
        fixed, mass = rows[best["fixed"]], rows[best["mass"]]
        best["times_less"] = fixed["tokens"] / mass["tokens"]
        key = "tokens_over_all_layers"
        best["times_less_over_all_layers"] = fixed[key] / mass[key]
    return best


def mean(values: Any) -> float:
    """Arithmetic mean."""
    numbers = list(values)
    return float(sum(numbers) / len(numbers))


def series(name: str) -> str:
    """A policy's name without its epsilon or budget."""
    kind, *rest = name.split()
    return " ".join([kind, *rest[1:]])


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy over KV touched, and KV touched by layer, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5), sharex=True)
    for axes, criterion, what in zip(
        both, CRITERIA, ("all tasks mixed", "the task that keeps least"), strict=True
    ):
        for label in sorted({series(name) for name in rows} - {"dense"}):
            chosen = [row for name, row in rows.items() if series(name) == label]
            points = sorted((row["tokens"], row["kept"][criterion]) for row in chosen)
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.axhline(KEEP, color="grey", linestyle=":", label=f"{KEEP:.0%} of dense")
        axes.set(xlabel="mean KV tokens touched by a sparse layer's head", title=what)
    both[0].set(ylabel="accuracy over dense")
    both[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / "mass_accuracy.png", dpi=90)

    name = result["best"]["each_task"]["mass"] or result["best"]["mixed"]["mass"]
    if name is None:
        return
    tasks = sorted({cell["task"] for cell in rows[name]["cells"]})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for position, task in enumerate(tasks):
        cells = [cell for cell in rows[name]["cells"] if cell["task"] == task]
        layers = [mean(c) for c in zip(*(c["tokens_by_layer"] for c in cells), strict=True)]
        at = [layer + 0.8 * (position / len(tasks) - 0.5) for layer in range(len(layers))]
        axes.bar(at, layers, width=0.8 / len(tasks), label=task)
    axes.set(xlabel="layer", ylabel="KV tokens touched by a head", yscale="log", title=name)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / "mass_layers.png", dpi=90)


def main() -> None:
    """Run the study."""
    p = study_parser(__doc__, "build/mass.json")
    p.add_argument("--plots", type=Path, help="folder for two PNG files")
    p.add_argument("--join", type=Path, nargs="+", default=[], help="results of other lengths")
    p.add_argument("--count", type=int, default=200, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    p.add_argument("--tasks", nargs="+", default=list(RULER_TASKS))
    p.add_argument("--score", choices=["page_mean", "page_minmax", "sparcas"], default="page_mean")
    p.add_argument("--page", type=int, default=16, help="tokens of a block; sparcas ranks tokens")
    p.add_argument("--channels", type=int, default=16, help="channels that sparcas scores with")
    p.add_argument("--sink", type=int, default=4)
    p.add_argument("--recent", type=int, default=8)
    p.add_argument("--share", choices=["min", "mean"], default="mean")
    p.add_argument("--cap", type=int, default=CAP, help="most tokens of a share of the mass")
    p.add_argument("--microbatch", type=int, default=32, help="tokens between two looks")
    p.add_argument("--margin", type=float, default=MARGIN, help="nats of the estimator scored")
    p.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS))
    p.add_argument("--scored", type=float, nargs="*", default=list(EPSILONS), help="epsilons")
    p.add_argument("--observed", type=float, nargs="*", default=list(EPSILONS), help="epsilons")
    args = p.parse_args()
    if args.score == "sparcas" and args.scored:
        p.error("servers take the estimator scored with pages alone: leave --scored empty")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    study = Study(model, FileEncoder(args.model), args.count, args.seed)
    base = Policy(
        args.score, page=args.page, channels=args.channels, sink=args.sink, recent=args.recent,
        microbatch=args.microbatch, share=args.share, dense_layers=1,
    )  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    mass = MassStudy(study, base, args.out)
    for path in args.join:
        mass.join(json.loads(path.read_text()))
    named = policies(base, args.budgets, args.scored, args.observed, args.cap, args.margin)
    mass.run(args.tasks, args.lengths, named)
    best = mass.conclude()
    mass.save()
    if args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        draw(mass.result, args.plots)
    print(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
