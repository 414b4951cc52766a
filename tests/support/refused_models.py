# SPDX-License-Identifier: Apache-2.0
"""Configs of models that a start with sparse attention refuses."""

import json
from typing import Any

from live_server import MODEL

LLAMA: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 512,
}
WIDE = {**LLAMA, "head_dim": 96}
TEMPERED = {**LLAMA, "attn_temperature_len": 1024}
MULTIQUERY = {**LLAMA, "num_attention_heads": 32, "num_key_value_heads": 1}
SHALLOW = {**LLAMA, "num_hidden_layers": 5}

# By the name of their folder.
MODELS = {
    "mla": MLA,
    "mistral": MISTRAL,
    "wide": WIDE,
    "multiquery": MULTIQUERY,
    "shallow": SHALLOW,
    "tempered": TEMPERED,
}
