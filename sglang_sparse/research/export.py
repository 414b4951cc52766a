# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the reference model in the Hugging Face layout."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.tasks.encoding import BOS, END, PAD, FileEncoder

MAX_BYTES = 12 * 2**20


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer that lies in ``source`` into ``folder``."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)


def export(model: ReferenceModel, folder: Path, tokenizer: Path) -> Path:
    """Write config, generation config, bf16 weights and the tokenizer of a folder into ``folder``.

    Raises:
        ValueError: the weights exceed 12 MiB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoder = FileEncoder(tokenizer)
    bos, eos, pad = (encoder.token_id(t) for t in (BOS, END, PAD))
    config = model.config.to_hf(bos, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "do_sample": True,
        "top_k": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    size = sum(w.numel() * w.element_size() for w in weights.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"weights take {size} bytes in bf16, {MAX_BYTES} allowed; shrink the model"
        )
    path = folder / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    copy_tokenizer(tokenizer, folder)
    return path


def load(folder: Path) -> ReferenceModel:
    """The model in ``folder``, with fp32 parameters.

    Raises:
        FileNotFoundError: the folder lacks ``config.json`` or the weights.
    """
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = ReferenceModel(config)
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({k: v.float() for k, v in weights.items()})
    return model
