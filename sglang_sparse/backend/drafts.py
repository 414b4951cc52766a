# SPDX-License-Identifier: Apache-2.0
"""Which backend a draft model attends on: the dense one of the server, without planes.

SGLang builds three for a draft model. The runner's own comes from the registry
(:func:`sglang_sparse.backend.create_backend`). The one for the steps of a draft and the one for
draft extension come from ``speculative/draft_utils.py: DraftBackendFactory``, whose tables know no
``sparse``. A name that the user gave with ``--speculative-draft-attention-backend`` holds for all.
"""

from collections.abc import Callable
from typing import Any

from sglang_sparse.launch import launch_of

_IN_PYTORCH = "torch_native"  # which SGLang has no draft backends for


def create_decode_backend(original: Callable[..., Any], factory: Any) -> Any:
    """AROUND hook on ``DraftBackendFactory.create_decode_backend``: for the steps of a draft.

    None for drafts of one token, which draft extension gives.
    """
    if _takes_sglangs(factory):
        return original(factory)
    from sglang_sparse.backend.draft_steps import DraftSteps

    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, steps) if steps > 1 else None


def create_draft_extend_backend(original: Callable[..., Any], factory: Any) -> Any:
    """AROUND hook on ``DraftBackendFactory.create_draft_extend_backend``."""
    if _takes_sglangs(factory):
        return original(factory)
    from sglang_sparse.backend.torch_native import TorchNativeBackend

    return TorchNativeBackend(factory.draft_model_runner)


def _takes_sglangs(factory: Any) -> bool:
    """Whether SGLang has the backend; names the server's dense one to it if nobody named any."""
    if launch_of(factory.draft_model_runner.server_args) is None:
        return True
    if factory.draft_attn_backend is None:
        from sglang_sparse.backend.inner import dense_name

        factory.draft_attn_backend = dense_name(factory.draft_model_runner)
    return bool(factory.draft_attn_backend != _IN_PYTORCH)
