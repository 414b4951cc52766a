# SPDX-License-Identifier: Apache-2.0
"""Perplexity a byte of decoding held-out English by position and budget, dense and sparse.

``python -m sglang_sparse.research.text_decode --corpus tokens.xz --out text-decode.json``

The prompt is dense. Then a document's own next tokens are decoded one by one, each step by the
policy, as a server's decode steps. Every position scores the same tokens: its prompt is the last so
many tokens before them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sparse.research.arguments import show_table, study_parser
from sglang_sparse.research.corpus.tokens import Ids, load, token_sizes
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load as load_model
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.study import SELECTORS, part_rows, policies
from sglang_sparse.research.tables import markdown, policy_key
from sglang_sparse.tasks.encoding import BOS, FileEncoder

_STRIDE = 4096


def places(documents: Sequence[Ids], longest: int, steps: int, count: int) -> list[Ids]:
    """``count`` stretches of ``longest + steps`` tokens, spread evenly over all that there are.

    Raises:
        ValueError: there are fewer.
    """
    size = longest + steps
    found = [d[end - size : end] for d in documents for end in range(size, len(d) + 1, _STRIDE)]
    if len(found) < count:
        raise ValueError(f"{len(found)} stretches of {size} tokens; asked for {count}")
    return [found[i * len(found) // count] for i in range(count)]


@torch.no_grad()
def nats(decoder: Decoder, policy: Policy, given: Tensor) -> Tensor:
    """Loss of each of ``given [rows, steps]``, decoded behind the decoder's prompts.

    The first is predicted by the prompt, which is dense whatever the policy, and is left out.
    """
    losses = []
    given = given.to(decoder.device)
    for step, _ in enumerate(decoder.replay(policy, given[:, :-1]), 1):
        logits = decoder.logits.float()
        losses.append(F.cross_entropy(logits, given[:, step], reduction="none"))
    return torch.stack(losses, dim=1)


def measure(
    model: ReferenceModel, prompts: Sequence[list[int]], given: Tensor, named: Sequence[Policy]
) -> list[Tensor]:
    """The sum of each row's :func:`nats` by every policy, ``[rows]`` in float64."""
    size = part_rows(len(prompts[0]))
    sums: list[list[Tensor]] = [[] for _ in named]
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        rows = max(1, 2**17 // len(prompts[0]))
        decoder = Decoder(model, prompts[part], given.shape[1], rows)
        for policy, own in zip(named, sums, strict=True):
            own.append(nats(decoder, policy, given[part]).double().sum(1).cpu())
    return [torch.cat(own) for own in sums]


def cell(loss: Tensor, dense: Tensor, sizes: Tensor) -> dict[str, float]:
    """Bits a byte, and how many more than dense, with the half width of its 95 % interval.

    ``loss`` and ``dense`` are in nats and ``sizes`` in bytes, ``[rows]``. The interval is the
    normal one of a ratio of sums, and takes rows as independent, though contexts may overlap.
    """
    total = float(sizes.sum())
    more = (loss - dense) / math.log(2)
    ratio = float(more.sum()) / total
    left = more - ratio * sizes
    half = 1.96 * math.sqrt(float(left.square().sum()) * len(left) / max(len(left) - 1, 1)) / total
    return {"bits": float(loss.sum()) / math.log(2) / total, "more": ratio, "half": half}


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a policy and budget, a column a position; dense, then what others add."""
    positions = sorted({c["position"] for c in cells})
    found = {(policy_key(c["policy"]), c["position"]): c for c in cells}
    rows = []
    for kind, budget in dict.fromkeys(key for key, _ in found):
        own = [found.get(((kind, budget), p)) for p in positions]
        shown = [_shown(kind, one) if one else "-" for one in own]
        rows.append([kind, str(budget) if budget else "", *shown])
    return markdown(["policy", "tokens", *(f"at {p:,}" for p in positions)], rows) + "\n"


def _shown(kind: str, one: dict[str, Any]) -> str:
    if kind == "dense":
        return f"{one['bits']:.4f}"
    return f"{one['more']:+.4f} ± {one['half']:.4f}"


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = study_parser(__doc__)
    p.add_argument("--corpus", type=Path, required=True, help="file of research.corpus.tokens")
    p.add_argument("--table", type=Path, help="file for the table as Markdown")
    p.add_argument("--positions", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    p.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    p.add_argument("--steps", type=int, default=64, help="tokens that are scored")
    p.add_argument("--count", type=int, default=96, help="places in the text")
    args = p.parse_args()
    encoder = FileEncoder(args.model)
    bos, corpus = encoder.token_id(BOS), load(args.corpus)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(args.model).to(device).eval()
    steps = args.steps + 1
    texts = places(corpus.documents("heldout", bos), max(args.positions), steps, args.count)
    given = torch.tensor([text[-steps:].tolist() for text in texts])
    sizes = torch.from_numpy(token_sizes(encoder))[given[:, 1:]].sum(1).double()
    named, cells = policies(args.budgets, SELECTORS), []
    for position in args.positions:
        # Of a position's tokens one begins the text, and one is the first that is given.
        prompts = [[bos, *text[-steps - position + 2 : -steps].tolist()] for text in texts]
        losses = measure(model, prompts, given, named)
        for policy, loss in zip(named, losses, strict=True):
            labels = {"policy": asdict(policy), "position": position, "count": args.count}
            cells.append(labels | cell(loss, losses[0], sizes))
        args.out.write_text(json.dumps({"steps": args.steps, "cells": cells}) + "\n")
    show_table(table(cells), args.table)


if __name__ == "__main__":
    main()
