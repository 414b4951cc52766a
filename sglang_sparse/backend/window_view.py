# SPDX-License-Identifier: Apache-2.0
"""A model runner as a backend sees it that serves the retrieval heads alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_sparse.backend.runner import launch_of_runner
from sglang_sparse.choices.heads.retrieval import RetrievalHeads
from sglang_sparse.choices.retention.everything import KeepAll
from sglang_sparse.launch import SparseLaunch, attach

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner


class View:
    """An object with some attributes of its own, and all others of the object that it shows."""

    def __init__(self, shown: Any, **own: Any) -> None:
        """``own`` are attributes, methods among them, in the place of ``shown``'s."""
        self.__dict__.update(own, _shown=shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_shown"], name)


def retrieval_view(runner: ModelRunner) -> Any:
    """``runner`` with a model whose KV heads are those of the pool that holds every token.

    Without tensor parallelism (``check_windowed`` refuses it).
    """
    pool, model, args = runner.token_to_kv_pool, runner.model_config, copy.copy(runner.server_args)
    launch = launch_of_runner(runner)
    heads = pool.full_kv_pool.head_num
    config = launch.config.model_copy(update={"heads": RetrievalHeads(), "retention": KeepAll()})
    attach(args, SparseLaunch(replace(launch.resolved, config=config)))
    return View(
        runner,
        server_args=args,
        token_to_kv_pool=pool.full_kv_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator.full_attn_allocator,
        is_hybrid_swa=False,
        sliding_window_size=None,
        model_config=model_with(model, heads),
    )


def model_with(model: ModelConfig, heads: int) -> ModelConfig:
    """``model`` with ``heads`` KV heads, and as many query heads each as before.

    Its methods count heads from these attributes, so each of them agrees with the pool. FlashInfer
    plans for the query heads that it is told of.
    """
    found, text = copy.copy(model), copy.copy(model.hf_text_config)
    group = model.num_attention_heads // model.num_key_value_heads
    for counts in (found, text):
        counts.num_attention_heads, counts.num_key_value_heads = group * heads, heads
    found.hf_text_config = text
    return found
