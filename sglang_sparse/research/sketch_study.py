# SPDX-License-Identifier: Apache-2.0
"""Accuracy of SparCas by the format of its key sketch, on the reference model.

    python -m sglang_sparse.research.sketch_study --out build/sketch.json

Dense, then every format at every budget on the retrieval tasks: dense prefill, selection at decode,
the first layer dense as in the reference preset.
"""

import json

import torch

from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy, Storage
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import NEEDLE_TASKS, READING_TASKS, FileEncoder, wilson

RETRIEVAL = (*NEEDLE_TASKS, "passkey", "variable_tracking", *READING_TASKS)
FORMATS: tuple[Storage, ...] = ("bf16", "fp8", "int8", "int4")


def rows_of(study: Study) -> list[dict[str, object]]:
    """Exact answers over all tasks, with a 95 % interval: dense, then a format and budget a row."""
    right: dict[tuple[str, int], list[float]] = {}
    for cell in study.result["cells"]:
        policy = cell["policy"]
        dense = policy["kind"] == "dense"
        key = ("dense", 0) if dense else (policy["storage"], policy["budget"])
        right.setdefault(key, []).append(cell["exact"])
    rows: list[dict[str, object]] = []
    for (name, budget), shares in right.items():
        count = study.count * len(shares)
        exact = round(sum(shares) * study.count)
        low, high = wilson(exact, count)
        rows.append(
            {"format": name, "budget": budget, "count": count, "exact": exact / count,
             "low": low, "high": high}
        )  # fmt: skip
    return rows


def main() -> None:
    """Run the study; the cells are in the report beside the rows."""
    parser = study_parser((__doc__ or "").split("\n", 1)[0], "build/sketch.json")
    parser.add_argument("--count", type=int, default=200, help="samples a task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = Study(
        load(args.model).to(device).eval(), FileEncoder(args.model), args.count, args.seed
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    policies = [Policy()]
    policies += [
        Policy("sparcas", budget, storage=storage, dense_layers=1)
        for budget in args.budgets
        for storage in FORMATS
    ]
    for task in RETRIEVAL:
        prepared = study.prepare(task, args.length)
        cells = [study.cell(task, args.length, prepared, policy) for policy in policies]
        study.say(task=task, exact=[cell["exact"] for cell in cells])
        report = {"length": args.length, "rows": rows_of(study), **study.result}
        args.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
