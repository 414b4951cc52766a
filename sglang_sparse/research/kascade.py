# SPDX-License-Identifier: Apache-2.0
"""Measures Kascade on the reference model, beside the other methods and dense.

``python -m sglang_sparse.research.kascade`` decodes with anchors and head maps of
``configs/reference/kascade.json`` over a dense and over a sparse prefill, and draws the results.
The most important cells are measured first, and a run continues after the last cell of its file.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.config import Anchors, load_preset
from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.study import Study
from sglang_sparse.research.tiles import TilePrefill
from sglang_sparse.tasks import FileEncoder

TASKS = ("multi_key", "multi_value", "multi_query", "variable_tracking", "single_key", "passkey")
FRACTIONS = (0.1, 0.2)
SWEEP = (0.025, 0.05, 0.4)
MAPPED = ("kascade", "kascade_unmapped")
SELECTING = (*MAPPED, "kascade_all_heads", "kascade_sketch", "sparcas", "page_minmax", "oracle")
FLOOR = 128  # tokens, as in the paper
SINK = 4  # tokens of the window's that are the prompt's first
LAYERS = 6
DENSE_FRACTION = 1.0  # of a prefill that is not sparse


def sharing() -> dict[str, Any]:
    """Anchors and head maps of the calibrated preset, as policies take them."""
    layers = load_preset("reference", "kascade").layers
    assert isinstance(layers, Anchors)
    maps = tuple(layers.role(i).heads or () for i in range(LAYERS))
    return {"anchors": layers.anchors, "head_maps": maps}


def methods(length: int, fraction: float) -> dict[str, Policy]:
    """Every method at one fraction of the context, Kascade also in the paper's other variants.

    ``kascade_unmapped`` reuses each head's own list, ``kascade_all_heads`` one list of all heads.
    """
    budget, shared = max(FLOOR, math.ceil(length * fraction)), sharing()
    anchors = shared["anchors"]
    return {
        "kascade": Policy("oracle", budget, **shared),
        "kascade_unmapped": Policy("oracle", budget, anchors=anchors),
        "kascade_all_heads": Policy("oracle", budget, anchors=anchors, pool="heads"),
        "kascade_sketch": Policy("sparcas", budget, **shared),
        "sparcas": Policy("sparcas", budget, dense_layers=1),
        "page_minmax": Policy("page_minmax", budget, dense_layers=1),
        "oracle": Policy("oracle", budget),
        "window": Policy("window", budget, sink=SINK, recent=budget - SINK),
    }


class KascadeStudy:
    """Cells of one run, each measured once: those of a file that an earlier run left are kept."""

    def __init__(self, study: Study, tasks: Sequence[str]) -> None:
        self.study, self.tasks = study, tasks
        self._done = {_key(cell) for cell in study.result["cells"]}

    def decode(self, length: int, fractions: Sequence[float], *, dense: bool) -> None:
        """Every method over a dense prefill; dense too, if asked."""
        chosen = [("dense", 0.0, Policy())] if dense else []
        for fraction in fractions:
            chosen += [(name, fraction, p) for name, p in methods(length, fraction).items()]
        for task in self.tasks:
            self._cells(task, length, chosen, None, DENSE_FRACTION)

    def prefill(self, length: int, fraction: float) -> None:
        """Kascade's decoding over Kascade's prefill, with head maps and without."""
        for task in self.tasks:
            for name in MAPPED:
                policy = methods(length, fraction)[name]
                tiles = TilePrefill(
                    fraction,
                    floor=FLOOR,
                    anchors=policy.anchors,
                    head_maps=policy.head_maps,
                    pool=policy.pool,
                )
                self._cells(task, length, [(name, fraction, policy)], tiles, fraction)

    def _cells(
        self,
        task: str,
        length: int,
        chosen: Sequence[tuple[str, float, Policy]],
        tiles: TilePrefill | None,
        prefill: float,
    ) -> None:
        parts = None
        for name, fraction, policy in chosen:
            labels = {"method": name, "fraction": fraction, "prefill_fraction": prefill}
            if _key({"task": task, "length": length, **labels}) in self._done:
                continue
            if parts is None:
                parts = self.study.prepare(task, length, prefill=tiles)
            row = self.study.cell(task, length, parts, policy, **labels)
            self.study.say(task=task, length=length, exact=row["exact"], **labels)


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    names = ("task", "length", "method", "fraction", "prefill_fraction")
    return tuple(cell[name] for name in names)


def _resume(study: Study, out: Path) -> None:
    """Take the cells that an earlier run of the same count and seed left in ``out``."""
    study.out = out
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.is_file():
        return
    found = json.loads(out.read_text())
    if (found["count"], found["seed"]) != (study.count, study.seed):
        raise SystemExit(f"{out} holds cells of another count or seed; name another file")
    study.result = found


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean accuracy over the share of the context kept at decode, one panel a length."""
    from matplotlib.figure import Figure

    lengths = sorted({cell["length"] for cell in cells})
    figure = Figure(figsize=(4.2 * len(lengths), 3.4), dpi=90, layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        here = [c for c in cells if c["length"] == length]
        for name in (*SELECTING, "window"):
            points = []
            for fraction in sorted({c["fraction"] for c in here if c["method"] == name}):
                found = [c["exact"] for c in here
                         if (c["method"], c["fraction"], c["prefill_fraction"])
                         == (name, fraction, DENSE_FRACTION)]  # fmt: skip
                if found:
                    points.append((100 * fraction, 100 * sum(found) / len(found)))
            if points:
                style = {} if name in SELECTING else {"color": "0.5", "ls": "--"}
                axes.plot(*zip(*points, strict=True), marker="o", label=name, **style)
        found = [c["exact"] for c in here if c["method"] == "dense"]
        if found:
            axes.axhline(100 * sum(found) / len(found), color="0.5", label="dense")
        axes.set(xlabel="% of the context kept", title=f"{length // 1024}K", ylim=(-3, 103))
        axes.set_xscale("log")
        shares = sorted({100 * c["fraction"] for c in here} - {0.0})
        axes.set_xticks(shares, [f"{share:g}" for share in shares])
        axes.minorticks_off()
    panels[0].set_ylabel("exact, %")
    panels[0].legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Run the study and draw it."""
    parser = study_parser(main.__doc__, "build/kascade.json")
    parser.add_argument("--count", type=int, default=200, help="samples a cell")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")],
                        default=[4096, 8192])  # fmt: skip
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model).to(device).eval()
    study = Study(model, FileEncoder(args.model), args.count, args.seed)
    _resume(study, args.out)
    kascade = KascadeStudy(study, args.tasks)
    for length in args.lengths:
        kascade.decode(length, FRACTIONS, dense=True)
    for length in args.lengths:
        for fraction in FRACTIONS:
            kascade.prefill(length, fraction)
    for length in args.lengths:
        kascade.decode(length, SWEEP, dense=False)
    study.say(done=True)
    draw(json.loads(args.out.read_text())["cells"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
