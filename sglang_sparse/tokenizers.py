# SPDX-License-Identifier: Apache-2.0
"""Several tokenizer processes (``--tokenizer-worker-num``): each of them loads plugins.

Seam: ``entrypoints/http_server.py: _setup_and_run_http_server``, which starts them with uvicorn.
"""

from collections.abc import Callable
from typing import Any

from sglang_sparse import compat
from sglang_sparse.launch import launch_of

APPLICATION = "sglang_sparse.tokenizer_worker:app"


def run_http_server(original: Callable[..., Any], server_args: Any, *args: Any, **kw: Any) -> Any:
    """AROUND hook: tokenizer processes of a sparse server run :mod:`.tokenizer_worker`."""
    if launch_of(server_args) is None or compat.resolved(server_args).tokenizer_worker_num == 1:
        return original(server_args, *args, **kw)
    with compat.current().workers_application(APPLICATION):
        return original(server_args, *args, **kw)
