# SPDX-License-Identifier: Apache-2.0
"""Answers of the reference model's presets, as they are shipped, on any task.

``python -m sglang_sparse.research.shipped --out shipped.json [--table table.md]``

Dense prefill, then every preset on the same prompts. ``lserve``, whose heads stream, is measured by
``research.heads_study``, ``cascade``, which drops tokens, by ``research.cascade_study``.
"""

import torch

from sglang_sparse.config import load_preset
from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.card import preset_table
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.preset_study import MODEL, policy_at
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import TASKS, FileEncoder

PRESETS = ("page_minmax", "sparcas", "kascade", "kascade_sketch", "psa", "psa_sketch")


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = preset_study_parser(__doc__, PRESETS)
    p.add_argument("--count", type=int, default=60, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lengths", type=int, nargs="+", default=[4096])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = Study(
        load(args.model).to(device).eval(), FileEncoder(args.model), args.count, args.seed
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out
    configs = {name: load_preset(MODEL, name) for name in args.presets}
    for length in args.lengths:
        named = {"dense": Policy()} | {n: policy_at(c, length) for n, c in configs.items()}
        for task in args.tasks:
            parts = study.prepare(task, length)
            for name, policy in named.items():
                study.cell(task, length, parts, policy, preset=name)
            found = [cell["exact"] for cell in study.result["cells"][-len(named) :]]
            study.say(task=task, length=length, exact=found)
    show_table(preset_table(study.result["cells"]) + "\n", args.table)


if __name__ == "__main__":
    main()
