# SPDX-License-Identifier: Apache-2.0
"""Averages models of one training: ``python -m sglang_sparse.research.average --help``.

Each part of a training ends at a low rate in a place of its own. Their mean answers more than the
last of them does, and costs no training (model soups, Wortsman et al.). ``--greedy`` leaves out the
models that make the mean worse, which prompts of the training split tell.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks import TASKS, Sample, TaskSuite
from sglang_sparse.tasks.encoding import FileEncoder

_READ_TOKENS = 2**17


def average(models: Sequence[ReferenceModel]) -> ReferenceModel:
    """A model whose every weight is the mean of those of ``models``, in fp32.

    Raises:
        ValueError: the models are not of one shape.
    """
    shapes = {model.config for model in models}
    if len(shapes) != 1:
        raise ValueError(f"models of one shape can be averaged, not of {len(shapes)}")
    states = [model.state_dict() for model in models]
    mean = ReferenceModel(shapes.pop())
    mean.load_state_dict(
        {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    )
    return mean


@torch.inference_mode()
def wrong(model: ReferenceModel, samples: Sequence[Sequence[Sample]]) -> float:
    """Mean probability that the model, which draws each token, does not draw an answer whole.

    Fewer prompts tell two models apart by it than by whether their greedy replies are exact. It
    computes in bf16 on a GPU and in fp32 elsewhere.

    Args:
        samples: parts of prompts that are read side by side.
    """
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lost: list[float] = []
    for part in samples:
        rows = [[*s.prompt_ids, *s.answer_ids] for s in part]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        hidden = model(ids.to(device), dtype)
        for s, states in zip(part, hidden, strict=True):
            first, answer = len(s.prompt_ids), torch.tensor(s.answer_ids, device=device)
            logits = model.logits(states[first - 1 : first - 1 + len(answer)]).float()
            nats = torch.nn.functional.cross_entropy(logits, answer, reduction="sum")
            lost.append(1 - float(torch.exp(-nats)))
    return sum(lost) / len(lost)


def greedy(
    models: Sequence[ReferenceModel], loss: Callable[[ReferenceModel], float]
) -> tuple[list[int], float]:
    """Which ``models`` to average, the best of them first, and the loss of their mean.

    Each is taken in the order of its own loss if the mean with it has a lower one than without.
    """
    alone = [loss(model) for model in models]
    best, *others = sorted(range(len(models)), key=alone.__getitem__)
    chosen, least = [best], alone[best]
    for index in others:
        found = loss(average([models[i] for i in (*chosen, index)]))
        print(json.dumps({"with": index, "alone": alone[index], "mean": found}), flush=True)
        if found < least:
            chosen, least = [*chosen, index], found
    return chosen, least


def main() -> None:
    """Average the models of some folders into another folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders; tokenizer of the first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--greedy", action="store_true", help="only those that make it better")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["joined", "collect"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--count", type=int, default=100, help="prompts a task and length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.resolve() in {folder.resolve() for folder in args.models}:
        raise SystemExit(f"--out {args.out} is one of the models; name another folder")
    try:
        models, encoder = [load(folder) for folder in args.models], FileEncoder(args.models[0])
        average(models)
    except (ValueError, FileNotFoundError) as refused:
        raise SystemExit(str(refused)) from None
    if args.greedy:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = [model.to(device) for model in models]
        suite = TaskSuite(encoder, "train")
        parts = []
        for length, task in itertools.product(args.lengths, args.tasks):
            samples = suite.samples(task, length, args.count, args.seed)
            rows = max(1, _READ_TOKENS // length)
            parts += [samples[at : at + rows] for at in range(0, len(samples), rows)]
        chosen, least = greedy(models, lambda model: wrong(model.to(device), parts))
        names = [str(args.models[index]) for index in chosen]
        print(json.dumps({"averaged": names, "wrong": least}), flush=True)
        models = [models[index] for index in chosen]
    export(average(models).cpu(), args.out, args.models[0])


if __name__ == "__main__":
    main()
