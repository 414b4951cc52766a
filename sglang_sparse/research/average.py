# SPDX-License-Identifier: Apache-2.0
"""Averages models of one training: ``python -m sglang_sparse.research.average --help``.

Each part of a training ends at a low rate in a place of its own. Their mean answers more than the
last of them does, and costs no training (model soups, Wortsman et al.).
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks.encoding import FileEncoder


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


def main() -> None:
    """Average the models of some folders into another folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders; tokenizer of the first")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.out.resolve() in {folder.resolve() for folder in args.models}:
        raise SystemExit(f"--out {args.out} is one of the models; name another folder")
    try:
        mean = average([load(folder) for folder in args.models])
    except (ValueError, FileNotFoundError) as wrong:
        raise SystemExit(str(wrong)) from None
    export(mean, args.out, FileEncoder(args.models[0]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.models[0] / name, args.out / name)


if __name__ == "__main__":
    main()
