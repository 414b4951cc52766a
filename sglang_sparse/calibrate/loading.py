# SPDX-License-Identifier: Apache-2.0
"""Loads a model of transformers whose attention is ours."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from sglang_sparse.config import ConfigError, Geometry


@dataclass(frozen=True)
class Loaded:
    """A model on its device, in evaluation mode.

    Attributes:
        model: transformers' causal language model.
        tokenizer: its tokenizer.
        geometry: its shape.
    """

    model: Any
    tokenizer: Any
    geometry: Geometry


# transformers finds attention by a name, so that each model has one of its own.
_names = (f"sglang_sparse_{number}" for number in count())


def load_model(path: str, device: torch.device, attend: Callable[..., Any]) -> Loaded:
    """Load the model at ``path`` in bf16 on a GPU, in fp32 on a CPU.

    Args:
        path: folder or hub name.
        device: where it runs.
        attend: as transformers' attention interface has it.

    Raises:
        ConfigError: transformers cannot load it.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = next(_names)
    AttentionInterface.register(name, attend)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        config = AutoConfig.from_pretrained(path)
        geometry = Geometry.from_hf_config(config.to_dict(), name=path)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=name)
    except Exception as error:  # transformers may raise any exception
        raise ConfigError(
            flag="--model",
            value=path,
            problem=f"transformers cannot load it ({type(error).__name__}: {error})",
            allowed="a folder or hub name of a causal language model",
            remedy="correct the path",
        ) from error
    return Loaded(model.to(device).eval(), tokenizer, geometry)
