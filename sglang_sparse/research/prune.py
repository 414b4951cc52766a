# SPDX-License-Identifier: Apache-2.0
"""Drops MLP neurons of a reference model: ``python -m sglang_sparse.research.prune --help``.

The model that is left is no worse a beginning for further training, and smaller.
"""

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_sparse.research.export import copy_tokenizer


def prune(weights: dict[str, Tensor], layers: int, keep: int) -> dict[str, Tensor]:
    """The weights with the ``keep`` neurons of each layer whose three vectors weigh most.

    Args:
        weights: of a Llama with ``layers`` layers, by name.
        keep: neurons of an MLP that are left, in their order.
    """
    left = dict(weights)
    for layer in range(layers):
        gate, up, down = (
            f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
        )
        weight = weights[gate].float().norm(dim=1) * weights[up].float().norm(dim=1)
        weight *= weights[down].float().norm(dim=0)
        chosen = weight.topk(keep).indices.sort().values
        left[gate], left[up] = weights[gate][chosen].clone(), weights[up][chosen].clone()
        left[down] = weights[down][:, chosen].clone()
    return left


def main() -> None:
    """Prune a folder's model into another folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--neurons", type=int, default=480, help="of each MLP that are left")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    if not 0 < args.neurons <= config["intermediate_size"]:
        raise SystemExit(f"--neurons {args.neurons}; allowed: 1 to {config['intermediate_size']}")
    args.out.mkdir(parents=True, exist_ok=True)
    weights = load_file(args.model / "model.safetensors")
    left = prune(weights, config["num_hidden_layers"], args.neurons)
    save_file(left, args.out / "model.safetensors", {"format": "pt"})
    config["intermediate_size"] = args.neurons
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_tokenizer(args.model, args.out)


if __name__ == "__main__":
    main()
