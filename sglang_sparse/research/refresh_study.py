# SPDX-License-Identifier: Apache-2.0
"""What it costs to keep SparCas' channels for many steps, layer by layer, on the reference model.

``python -m sglang_sparse.research.refresh_study --out refresh.json [--table table.md]``

The paper chooses channels every 64 steps. Each arm decodes the same prompts: all layers choose at
every step, all keep theirs, or one layer alone keeps its own. Beside it, along the replies of the
first arm and after its first step: how many of the channels of the first step a new choice would
take again; how often a KV head reads afar, with more than half of its attention on tokens that are
not always kept; and which share of the attention the selected tokens then hold by either choice.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_sparse.research.arguments import show_table, study_parser
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import (
    Cache,
    Policy,
    attend_mask,
    kept_share,
    sparcas_channels,
    window_mask,
)
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import NEEDLE_TASKS, TASKS, FileEncoder

TASKS_ASKED = (*NEEDLE_TASKS, "passkey", "variable_tracking")
_NAMES = ("again", "afar", "by_new", "by_kept")


def arms(policy: Policy, layers: int, steps: int) -> dict[str, Policy]:
    """The arms by name; layers that attend to everything are in none."""
    selecting = range(policy.dense_layers, layers)
    every = (1,) * layers
    found = {"none": policy, "all": replace(policy, refresh=(steps,) * layers)}
    for layer in selecting:
        one = (*every[:layer], steps, *every[layer + 1 :])
        found[f"layer {layer}"] = replace(policy, refresh=one)
    return found


class Drift:
    """Watches a decoder whose layers choose anew, and compares with the choice of its first step.

    Attributes:
        sums: ``[layers, 4]``, summed over later steps, rows and KV heads: the share of channels
            that a new choice takes again, 1 where a head reads afar, and the share of its attention
            there by a new choice and by the kept one.
        seen: ``[layers]``, how many there were.
    """

    def __init__(self, policy: Policy, layers: int) -> None:
        self.policy = policy
        self.sums = torch.zeros(layers, len(_NAMES), dtype=torch.float64)
        self.seen = torch.zeros(layers, dtype=torch.float64)
        self._first: dict[int, Tensor] = {}

    def begin(self) -> None:
        """The next step of a decoder is the first one of other prompts."""
        self._first.clear()

    def __call__(self, layer: int, q: Tensor, cache: Cache, lengths: Tensor) -> None:
        """See :class:`.Decoder`."""
        assert cache.sketch is not None
        policy = self.policy
        new = sparcas_channels(q, cache.sketch, policy.channels)
        kept = self._first.setdefault(layer, new)
        if kept is new:
            return

        def share(mask: Tensor) -> Tensor:
            return kept_share(q, cache.k, lengths, mask).double().mean(-1)

        always = window_mask(cache.k.shape[2], lengths, policy.sink, policy.recent)
        afar = share(always[:, None]) < 0.5
        again = (new[..., None] == kept[..., None, :]).any(-1).double().mean(-1)
        by_either = [
            share(attend_mask(policy, q, replace(cache, channels=chosen), lengths)) * afar
            for chosen in (new, kept)
        ]
        self.sums[layer] += torch.stack([part.sum() for part in (again, afar, *by_either)]).cpu()
        self.seen[layer] += again.numel()

    def rows(self) -> list[dict[str, float]]:
        """Means of each layer that selects; of the shares, over heads and steps that read afar."""
        found = []
        for layer, (sums, seen) in enumerate(zip(self.sums.tolist(), self.seen, strict=True)):
            if seen:
                again, afar, *shares = sums
                means = (again / seen, afar / seen, *(part / max(afar, 1) for part in shares))
                found.append({"layer": layer, **dict(zip(_NAMES, map(float, means), strict=True))})
        return found


def measure(study: Study, policies: dict[str, Policy], drift: Drift, task: str, length: int) -> Any:
    """Share of exact replies of each arm; cells go into ``study.result``."""
    parts, found = study.prepare(task, length), {}
    for arm, policy in policies.items():
        right = 0
        for samples, decoder in parts:
            drift.begin()
            decoder.watch = drift if arm == "none" else None
            right += sum(study.marks(samples, decoder, policy))
        found[arm] = right / study.count
        study.result["cells"].append(
            {"arm": arm, "task": task, "length": length, "exact": found[arm]}
        )
    return found


def summary(result: dict[str, Any]) -> str:
    """A Markdown table, a row an arm: per cent exact, and what was seen of its layer."""
    cells, drift = result["cells"], {f"layer {row['layer']}": row for row in result["drift"]}
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lines = [
        f"| layers that keep theirs | {' | '.join(tasks)} | channels chosen again, % | reads afar, "
        "% of steps | then reached by a new choice, % | by the kept one, % |",
        f"| --- | {' | '.join(['---:'] * (len(tasks) + len(_NAMES)))} |",
    ]
    for arm in dict.fromkeys(cell["arm"] for cell in cells):
        exact = {cell["task"]: 100 * cell["exact"] for cell in cells if cell["arm"] == arm}
        shares = [f"{100 * drift[arm][name]:.1f}" if arm in drift else "" for name in _NAMES]
        row = [arm, *(f"{exact[task]:.1f}" for task in tasks), *shares]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = study_parser(__doc__)
    p.add_argument("--table", type=Path, help="file for the table as Markdown")
    p.add_argument("--count", type=int, default=24, help="samples a cell")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--steps", type=int, default=64, help="steps that channels are kept for")
    p.add_argument("--budget", type=int, default=256)
    p.add_argument("--tasks", nargs="+", default=list(TASKS_ASKED), choices=list(TASKS))
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    study = Study(model, FileEncoder(args.model), args.count, args.seed)
    policy = Policy("sparcas", args.budget, dense_layers=1)
    policies = arms(policy, model.config.layers, args.steps)
    drift = Drift(policy, model.config.layers)
    study.result |= {"steps": args.steps, "budget": args.budget}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out
    for task in args.tasks:
        found = measure(study, policies, drift, task, args.length)
        study.result["drift"] = drift.rows()
        study.say(task=task, **found)
    show_table(summary(study.result), args.table)


if __name__ == "__main__":
    main()
