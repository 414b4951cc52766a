# SPDX-License-Identifier: Apache-2.0
"""SGLang's process-wide configuration, published once for these tests."""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside
# Refused on other versions.
_OLDER = [f"test_{name}.py" for name in ("host_kv", "host_prompts", "host_tier")]
collect_ignore = [] if version("sglang") == "0.5.17" else _OLDER


@pytest.fixture(autouse=True)
def published_server_args() -> Iterator[object]:
    """SGLang reads flags from a published `ServerArgs`; its own scoped override publishes one."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(
        device="cpu", attention_backend="torch_native", radix_cache_backend="sparse"
    ) as server_args:
        from radix_parts import asked_for
        from sglang.srt.mem_cache import registry

        from sglang_sparse import compat
        from sglang_sparse_radix.tree_factory import BACKEND_NAME, register

        # The plugin registers a rule of its own where another test of this process loads it.
        trees = registry._RADIX_CACHE_REGISTRY
        plugins = trees.pop(BACKEND_NAME, None)
        sglang = compat.current()
        register(
            sglang.tree_class(), sglang.hierarchical_tree_class, sglang.window_tree_class, asked_for
        )
        yield server_args
        del trees[BACKEND_NAME]
        if plugins is not None:
            trees[BACKEND_NAME] = plugins


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads only wait for each other, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A real `ModelConfig` of a tiny Llama shape."""
    from radix_parts import tiny_model_config

    return tiny_model_config(tmp_path_factory.mktemp("tiny-llama"))
