# SPDX-License-Identifier: Apache-2.0
"""Whether answers that part by rounding part through the lists alone, on the reference model.

``python -m sglang_sparse.research.rounding_study --out rounding.json [--table table.md]``

Two ranks add the halves of a projection where one rank computes it whole. Here both are models of
one process, in bf16. The one that adds decodes what the whole one said: once with lists of its own,
and once with those that the whole one took. Answers part at the first token that it would not have
said; the *gap* is the difference of the whole one's two largest logits there.
"""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.host_frames import preset_policy
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.research.policies import Policy

PRESETS = ("sparcas", "page_minmax", "kascade", "kascade_sketch", "psa", "psa_sketch")
NEAR = 0.25  # two steps of bf16 logits

Masks = Sequence[dict[int, Tensor]]


def in_halves(model: ReferenceModel) -> ReferenceModel:
    """A copy whose outputs of attention and of the MLP are sums of two products, as two ranks'."""

    def added(linear: nn.Linear, given: tuple[Tensor], whole: Tensor) -> Tensor:
        weight = linear.weight.to(whole.dtype)
        parts = zip(given[0].chunk(2, -1), weight.chunk(2, 1), strict=True)
        one, other = (F.linear(a.contiguous(), b.contiguous()) for a, b in parts)
        return one + other

    model = copy.deepcopy(model)
    for index in range(model.config.layers):
        layer = model.layer(index)
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.register_forward_hook(added)
    return model


def parted(said: Tensor, logits: Tensor, other: Tensor) -> list[tuple[int, float]]:
    """(step, gap) where each row parts that does.

    Args:
        said: Tokens ``[rows, steps]``.
        logits: Of the model that said them, ``[rows, steps, vocabulary]``.
        other: Of the model that decoded them.
    """
    found = []
    for row, differs in enumerate(other.argmax(-1) != said):
        if differs.any():
            step = int(differs.int().argmax())
            first, second = logits[row, step].float().topk(2).values.tolist()
            found.append((step, first - second))
    return found


def replayed(
    decoder: Decoder, policy: Policy, said: Tensor, masks: Masks = ()
) -> tuple[Tensor, Masks]:
    """Logits of each of the tokens ``said [rows, steps]``, and what was attended to before."""
    logits, kept = [decoder.prompt_logits], []
    for mask in decoder.replay(policy, said[:, :-1], masks):
        logits.append(decoder.logits)
        kept.append(mask)
    return torch.stack(logits, 1), kept


def study(whole: Decoder, halves: Decoder, policy: Policy) -> dict[str, Any]:
    """Where answers part with lists of their own, and with those of the whole model."""
    said = torch.tensor(whole.generate(policy, end=-1))
    logits, masks = replayed(whole, policy, said)
    assert torch.equal(logits.argmax(-1), said)
    own, _ = replayed(halves, policy, said)
    same, _ = replayed(halves, policy, said, masks)
    return {"own": parted(said, logits, own), "same": parted(said, logits, same)}


def repeating(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random passages that repeat, as those of ``loadtest/tensor_parallel.py``."""
    source, prompts = random.Random(f"{count}/{length}"), []
    for _ in range(count):
        segment = [source.randrange(300, vocab) for _ in range(source.randrange(40, 200))]
        prompts.append((segment * (length // len(segment) + 1))[:length])
    return prompts


def table(result: dict[str, Any]) -> str:
    """A Markdown row for each preset."""
    lines = ["| preset | own lists | lists of the whole model |", "| --- | --- | --- |"]
    for name, found in result["presets"].items():
        cells = []
        for places in found.values():
            gaps = [gap for _, gap in places]
            wide = sum(gap > NEAR for gap in gaps)
            cells.append(f"{len(gaps)} ({max(gaps, default=0):.2f}, {wide})")
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Study the presets, one after the other."""
    parser = preset_study_parser(__doc__, PRESETS)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--length", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    whole = load(args.model).eval()
    prompts = repeating(args.count, args.length, whole.config.vocab_size)
    one, other = (
        Decoder(model, prompts, args.steps, dtype=torch.bfloat16)
        for model in (whole, in_halves(whole))
    )
    result: dict[str, Any] = {"prompts": args.count, "length": args.length, "steps": args.steps}
    result["presets"] = {
        name: study(one, other, preset_policy(name, args.length)) for name in args.presets
    }
    args.out.write_text(json.dumps(result))
    show_table(table(result), args.table)


if __name__ == "__main__":
    main()
