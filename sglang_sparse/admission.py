# SPDX-License-Identifier: Apache-2.0
"""Refuses prompts that SGLang would accept and never run.

Seams: ``managers/tp_worker.py: TpModelWorker.get_worker_info``, which says how long a prompt may
be; ``managers/schedule_policy.py: PrefillAdder.add_one_req``, which runs one only if a page is left
beside it. A prompt between the two waits for ever, and all requests behind it. With pages of one
token, as dense servers have, there is none; with ours there are up to 58 lengths (SGLang's issue
28530). Both tested versions do so.
"""

from collections.abc import Callable
from typing import Any

from sglang_sparse.launch import launch_of

_MAX_TOKENS, _MAX_PROMPT = 0, 5  # places in what `get_worker_info` returns


def limit_prompts(original: Callable[..., Any], worker: Any) -> Any:
    """AROUND hook on ``TpModelWorker.get_worker_info``: prompts leave a page of the pool."""
    info = original(worker)
    if launch_of(worker.server_args) is None:
        return info
    # A prompt has to be shorter than the limit.
    most = min(info[_MAX_PROMPT], info[_MAX_TOKENS] - worker.server_args.page_size)
    return (*info[:_MAX_PROMPT], most, *info[_MAX_PROMPT + 1 :])
