# SPDX-License-Identifier: Apache-2.0
"""What fp8 KV costs the reference model, and what planes of fewer bits cost beside it.

``python -m sglang_sparse.research.fp8_study --out build/fp8.json [--report report.json]``

Every arm answers the same prompts: dense with rows in bf16 and in fp8, then presets with rows in
fp8 and each format of their planes. Prompts attend to rows as the pool holds them, too. A run goes
on where ``--out`` ends; ``--join`` adds what other runs measured. The report has no marks of single
prompts: the right answers of each cell, and arms compared with others prompt by prompt.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.calibrate.files import replacing
from sglang_sparse.config import load_preset
from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy, Storage
from sglang_sparse.research.preset_study import MODEL, policy_at
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import RULER_TASKS, FileEncoder, Sample, wilson

DENSE, BASE, WIDE_DIGEST = "dense bf16", "dense fp8", "psa bf16"
PRESETS = ("page_minmax", "kascade", "psa", "sparcas", "psa_sketch", "kascade_sketch")
POOLS = {
    "words": ("common_words", "frequent_words"),
    "retrieval": tuple(task for task in RULER_TASKS if not task.endswith("_words")),
    "multi_query": ("multi_query",),  # where methods differ most
}


def arms(length: int) -> tuple[dict[str, Policy], dict[str, Policy]]:
    """Arms with rows in bf16, and with rows in fp8: dense, and every preset.

    After a preset's name stands the format of its planes; in bf16 they are those of the preset.
    """
    policies = {name: policy_at(load_preset(MODEL, name), length) for name in PRESETS}
    both = {name: policies[name] for name in ("page_minmax", "kascade")}
    sketches = {name: policies[name] for name in ("sparcas", "psa_sketch", "kascade_sketch")}
    wide = both | {"psa": policies["psa"], **sketches}
    narrow = both | {"psa bf16": policies["psa"], "psa fp8": policies["psa"]}
    formats: tuple[Storage, ...] = ("fp8", "int4")
    for storage in formats:
        for name, policy in sketches.items():
            narrow[f"{name} {storage}"] = replace(policy, storage=storage)
    return (
        {DENSE: Policy()} | {f"{name} in bf16": policy for name, policy in wide.items()},
        {BASE: Policy()} | narrow,
    )


def paired(ours: str, base: str) -> dict[str, Any]:
    """Compare two arms' marks, a digit a prompt: points, with Newcombe's 95 % interval.

    Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10 without its correction.
    """
    count, pairs = len(ours), list(zip(ours, base, strict=True))
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    both, none = pairs.count(("1", "1")), pairs.count(("0", "0"))
    p, q = ours.count("1") / count, base.count("1") / count
    (low_p, high_p), (low_q, high_q) = (wilson(x.count("1"), count) for x in (ours, base))
    margins = (both + gained) * (lost + none) * (both + lost) * (gained + none)
    phi = (both * none - gained * lost) / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    low, high = p - q - reach(p - low_p, high_q - q), p - q + reach(high_p - p, q - low_q)
    points = [round(100 * x, 2) for x in (p, p - q, low, high)]
    return dict(zip(("exact", "points", "low", "high"), points, strict=True)) | {
        "count": count, "gained": gained, "lost": lost,
    }  # fmt: skip


def pairs_of(names: list[str]) -> Iterator[tuple[str, str]]:
    """Arms and what each is compared with: dense of the same rows, and planes of more bits."""
    yield BASE, DENSE
    for name in names:
        preset = name.split()[0]
        if name.endswith(" in bf16"):
            yield name, DENSE
        elif preset != "dense" and name != WIDE_DIGEST:
            yield name, BASE
        if name.endswith("int4"):
            yield name, f"{preset} fp8"
    yield "psa fp8", WIDE_DIGEST


def rows_of(marks: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """The comparisons of :func:`pairs_of` over pools of tasks, at lengths where all were asked.

    Args:
        marks: of each cell, ``task length``, the marks of each arm.
    """
    lengths = dict.fromkeys(name.split()[1] for name in marks)
    for pool, tasks in POOLS.items():
        for arm, base in pairs_of(list(dict.fromkeys(chain(*marks.values())))):
            cells: list[dict[str, str]] = []
            for length in lengths:
                some = [marks.get(f"{task} {length}", {}) for task in tasks]
                cells += some if all(arm in cell and base in cell for cell in some) else []
            if cells:
                ours, theirs = ("".join(cell[name] for cell in cells) for name in (arm, base))
                yield {"tasks": pool, "arm": arm, "than": base} | paired(ours, theirs)


class Fp8Study:
    """Marks of every arm, for prompts of ``tokens`` tokens together at a time."""

    def __init__(self, study: Study, out: Path, tokens: int) -> None:
        self.study, self.out, self.tokens = study, out, tokens
        self.marks: dict[str, dict[str, str]] = {}
        if out.exists():
            self.marks = json.loads(out.read_text())["marks"]

    def run(self, tasks: list[str], length: int, presets: list[str]) -> None:
        """Measure what is missing of each task's prompts of a length; tasks take turns."""
        study = self.study
        chosen = tuple(
            {arm: policy for arm, policy in some.items() if arm.split()[0] in ("dense", *presets)}
            for some in arms(length)
        )
        rows = max(1, self.tokens // length)
        for start in range(0, study.count, rows):
            for task in tasks:
                cell = self.marks.setdefault(f"{task} {length}", {})
                if len(cell.get(DENSE, "")) > start:
                    continue
                samples = study.suite.samples(task, length, study.count, study.seed)
                self._measure(samples[start : start + rows], cell, chosen)
                right = {arm: mark.count("1") for arm, mark in cell.items()}
                study.say(task=task, length=length, count=len(cell[DENSE]), right=right)

    def _measure(
        self, part: list[Sample], cell: dict[str, str], chosen: tuple[dict[str, Policy], ...]
    ) -> None:
        prompts, room = [s.prompt_ids for s in part], max(len(s.answer_ids) for s in part) + 4
        for dtype, policies in zip((torch.bfloat16, torch.float8_e4m3fn), chosen, strict=True):
            decoder = Decoder(self.study.model, prompts, room, 8, kv_dtype=dtype)
            for arm, policy in policies.items():
                decoder.plane_dtype = torch.bfloat16 if arm == WIDE_DIGEST else dtype
                got = self.study.marks(part, decoder, policy)
                cell[arm] = cell.get(arm, "") + "".join("01"[mark] for mark in got)
        self.save()

    def save(self) -> None:
        """Write the marks so far."""
        with replacing(self.out) as draft:
            draft.write_text(json.dumps({"seed": self.study.seed, "marks": self.marks}) + "\n")


def report(marks: dict[str, dict[str, str]], seed: int) -> dict[str, Any]:
    """What follows from marks, by columns; right answers are null where an arm was not asked."""
    compared, names = list(rows_of(marks)), list(dict.fromkeys(chain(*marks.values())))
    cells = [
        [name, len(cell[DENSE]), [cell[arm].count("1") if arm in cell else None for arm in names]]
        for name, cell in marks.items()
    ]
    return {
        "seed": seed, "arms": names, "cells": cells,
        "columns": list(compared[0]), "rows": [[*row.values()] for row in compared],
    }  # fmt: skip


def main() -> None:
    """Run the study."""
    parser = study_parser((__doc__ or "").split("\n", 1)[0], "build/fp8.json")
    parser.add_argument("--count", type=int, default=96, help="samples a task")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--token-batch", type=int, default=16_384, help="decoded side by side")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="files of other runs")
    parser.add_argument("--report", type=Path, help="file for what follows from the marks")
    known = list(RULER_TASKS)
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    whole = Study(model, FileEncoder(args.model), args.count, args.seed)
    study = Fp8Study(whole, args.out, args.token_batch)
    for path in args.join:
        study.marks |= json.loads(path.read_text())["marks"]
    study.run(args.tasks, args.length, args.presets)
    if args.report is not None:
        made = report(study.marks, args.seed)
        args.report.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
