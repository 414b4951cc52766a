# SPDX-License-Identifier: Apache-2.0
"""Small draft models for the reference model, in the formats of EAGLE and EAGLE3.

Nothing is trained: EAGLE's is the served model, as far as its format allows, and EAGLE3's repeats
the last token. So some drafts are accepted and some are rejected. As a script it writes both into
a folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
from local import MODEL  # isort: skip  # that of the checkout: packages leave its weights out

SMALL = 1e-5  # of random weights, which should hardly change a draft
CAPTURED = [0, 2, 4]  # layers of the served model whose output EAGLE3 reads
WORDS = 1536  # of the served model's tokens, which EAGLE3 drafts

Weights = dict[str, torch.Tensor]


def write_eagle(folder: Path) -> Path:
    """A `LlamaForCausalLMEagle` in `folder`, of the served model's layers.

    It reads the next token's embedding, and hardly the served model's state. EAGLE has no norm
    before the first layer; weights stand in for it, as if all embeddings were of one length.
    """
    served, config = _served(), _config("LlamaForCausalLMEagle")
    hidden = int(config["hidden_size"])
    weights = {
        name.removeprefix("model."): weight
        for name, weight in served.items()
        if name.startswith("model.layers.")
    }
    norm = weights.pop("layers.0.input_layernorm.weight")
    length = served["model.embed_tokens.weight"].square().mean(1).sqrt().mean()
    for part in "qkv":
        weights[f"layers.0.self_attn.{part}_proj.weight"] *= norm / length
    states = SMALL * torch.randn((hidden, hidden), generator=torch.Generator().manual_seed(1))
    weights["fc.weight"] = torch.cat([torch.eye(hidden), states], 1)
    weights["fc.bias"] = torch.zeros(hidden)
    return _save(folder, config, weights)


def write_eagle3(folder: Path) -> Path:
    """A `LlamaForCausalLMEagle3` in `folder`, with an LM head of its own over some tokens.

    It takes the served model's state for its own and adds a layer of small random weights. So it
    guesses that the last token is repeated.
    """
    served = _served()
    config = _config(
        "LlamaForCausalLMEagle3",
        num_hidden_layers=1,
        draft_vocab_size=WORDS,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": CAPTURED,
        },
    )
    hidden, tokens = int(config["hidden_size"]), int(config["vocab_size"])
    random = torch.Generator().manual_seed(1)
    words = torch.randperm(tokens, generator=random)[:WORDS].sort().values
    weights = {
        name.replace("model.layers.0", "midlayer"): SMALL
        * torch.randn(weight.shape, generator=random)
        for name, weight in served.items()
        if name.startswith("model.layers.0.") and name.endswith("proj.weight")
    }
    for part in "qkv":  # which read the token beside the state
        name = f"midlayer.self_attn.{part}_proj.weight"
        weights[name] = torch.cat([weights[name]] * 2, 1)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{norm}.weight"] = torch.ones(hidden)
    states = SMALL * torch.randn((hidden, len(CAPTURED) * hidden), generator=random)
    states[:, -hidden:] += torch.eye(hidden)
    return _save(
        folder,
        config,
        weights
        | {
            "fc.weight": states,
            "norm.weight": served["model.norm.weight"],
            "lm_head.weight": served["model.embed_tokens.weight"][words],
            "d2t": words - torch.arange(WORDS),
        },
    )


def _served() -> Weights:
    return {name: weight.float() for name, weight in load_file(MODEL / "model.safetensors").items()}


def _config(architecture: str, **more: Any) -> dict[str, Any]:
    """The served model's; SGLang takes another LM head than the embedding for granted."""
    served: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    return served | {"architectures": [architecture], "tie_word_embeddings": False, **more}


def _save(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    write_eagle(Path(sys.argv[1]) / "eagle")
    write_eagle3(Path(sys.argv[1]) / "eagle3")
