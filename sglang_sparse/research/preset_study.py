# SPDX-License-Identifier: Apache-2.0
"""Accuracy and KV touched of the reference model's presets, as they are shipped.

``python -m sglang_sparse.research.preset_study --out presets.json [--table table.md]``

Every setting is the preset's own: score, units, budget, sinks, recent tokens, dense layers. Cells
that ``--out`` holds already are not measured again.
"""

import math
from typing import Any

import torch

from sglang_sparse.config import (
    Anchors,
    EveryLayer,
    Exact,
    FirstDense,
    KeySketch,
    MassBudget,
    PageMean,
    PageMinMax,
    SparseConfig,
    StreamingHeads,
    load_preset,
)
from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.export import load
from sglang_sparse.research.mass_study import MassStudy
from sglang_sparse.research.policies import Kind, Policy
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import RULER_TASKS, TASKS, FileEncoder, wilson

MODEL = "reference"
PRESETS = ("psa", "psa_sketch", "sparcas", "page_minmax")
KINDS: dict[str, Kind] = {
    "key_sketch": "sparcas", "page_minmax": "page_minmax", "page_mean": "page_mean",
    "exact": "oracle",
}  # fmt: skip


def policy_of(config: SparseConfig) -> Policy:
    """The policy that a server's config is.

    A server attends to the current token beside its list, a policy counts it in: as one token more,
    and, in a page, as part of the last one.

    Raises:
        ValueError: no policy is what the config says.
    """
    if isinstance(config.heads, StreamingHeads):
        raise ValueError(f"no policy has heads of two kinds: {config.heads}")
    return selecting_policy(config)


def selecting_policy(config: SparseConfig) -> Policy:
    """The same of the heads that select; ``heads_study`` says what the others see.

    Raises:
        ValueError: no policy is what the config says of them.
    """
    score, budget, layers = config.score, config.budget, config.layers
    fresh = not isinstance(score, KeySketch) or score.refresh_every == 1
    plain = isinstance(layers, FirstDense | EveryLayer) and config.cadence.every == 1 and fresh
    most, fraction = budget.list_size
    if not plain or fraction or not isinstance(score, KeySketch | PageMinMax | PageMean):
        raise ValueError(f"no policy has {layers}, {score}, {budget} and {config.cadence}")
    own: dict[str, Any] = {}
    if isinstance(budget, MassBudget):
        margin = budget.margin if budget.estimator == "scored" else None
        own = {"epsilon": budget.epsilon, "microbatch": budget.microbatch, "margin": margin}
        own |= {"share": budget.share}
    tokens = most + (1 if config.unit == 1 else 0)
    dense = layers.n if isinstance(layers, FirstDense) else 0
    return Policy(budget=tokens, dense_layers=dense, **scoring(config), **own)


def policy_at(config: SparseConfig, length: int) -> Policy:
    """The policy that a config is at contexts of about ``length`` tokens, with anchors or without.

    Raises:
        ValueError: as :func:`policy_of`.
    """
    layers = config.layers
    if not isinstance(layers, Anchors):
        return policy_of(config)
    assert config.model is not None
    floor, fraction = config.budget.list_size
    heads = tuple(layers.role(i).heads or () for i in range(config.model.num_hidden_layers))
    return Policy(
        budget=max(floor, math.ceil(fraction * (length - 1))) + 1,
        anchors=layers.anchors,
        head_maps=heads,
        **scoring(config),
    )


def scoring(config: SparseConfig) -> dict[str, Any]:
    """What a policy has from a config's score, and what is always kept beside it."""
    score = config.score
    own: dict[str, Any] = {
        "kind": KINDS[score.kind], "sink": config.sink_tokens, "recent": config.recent_tokens + 1,
    }  # fmt: skip
    if isinstance(score, Exact):
        return own | {"pool": score.pool}
    assert isinstance(score, KeySketch | PageMinMax | PageMean)
    own["reduce"] = score.reduce
    if not isinstance(score, KeySketch):
        joined = config.unit > score.logical_page
        return own | {"page": config.unit, "logical": score.logical_page if joined else 0}
    # Rows are in 16 bits, beside which `auto` is fp8.
    storage = "fp8" if score.storage == "auto" else score.storage
    return own | {"channels": score.channels, "storage": storage}


def summary(result: dict[str, Any]) -> str:
    """A Markdown table of a concluded study, a row a policy.

    Accuracy is over all tasks and lengths, with its 95 % Wilson interval; tokens are a KV head's.
    """
    lines = [
        "| | exact, % | of dense, % | the task that keeps least, % | KV tokens in a sparse layer "
        "| over all layers | times less than dense, sparse layers | over all layers |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    dense = result["rows"]["dense"]
    for name, row in result["rows"].items():
        count = result["count"] * len(row["cells"])
        low, high = wilson(round(row["exact"] * count), count)
        tokens, whole = row["tokens"], row["tokens_over_all_layers"]
        lines.append(
            f"| {name} | {100 * row['exact']:.1f} ({100 * low:.1f} to {100 * high:.1f}) "
            f"| {100 * row['kept']['mixed']:.1f} | {100 * row['kept']['each_task']:.1f} "
            f"| {tokens:,.0f} | {whole:,.0f} "
            f"| {dense['tokens'] / tokens:.1f} | {dense['tokens_over_all_layers'] / whole:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = preset_study_parser(__doc__, PRESETS)
    p.add_argument("--count", type=int, default=192, help="samples a cell")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    p.add_argument("--tasks", nargs="+", default=list(RULER_TASKS), choices=list(TASKS))
    args = p.parse_args()
    named = {name: policy_of(load_preset(MODEL, name)) for name in args.presets}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = Study(
        load(args.model).to(device).eval(), FileEncoder(args.model), args.count, args.seed
    )
    (dense_layers,) = {policy.dense_layers for policy in named.values()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    mass = MassStudy(study, Policy(dense_layers=dense_layers), args.out)
    mass.run(args.tasks, args.lengths, {"dense": Policy(), **named})
    mass.conclude()
    mass.save()
    show_table(summary(mass.result), args.table)


if __name__ == "__main__":
    main()
