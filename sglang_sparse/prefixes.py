# SPDX-License-Identifier: Apache-2.0
"""Tells the radix tree from which position a request attends sparsely."""

from typing import Any

from sglang_sparse.launch import launch_of
from sglang_sparse.request_options import parse
from sglang_sparse_radix.branches import DENSE, SparseFrom


def sparse_from(server_args: Any, req: Any) -> SparseFrom:
    """The positions from which a request attends sparsely.

    Args:
        server_args: SGLang's ``ServerArgs``.
        req: SGLang's ``Req``; its ``sampling_params.custom_params`` were checked on arrival.

    Raises:
        ConfigError: the parameters are not allowed.
    """
    launch = launch_of(server_args)
    if launch is None:
        return DENSE
    config = launch.config
    options = parse(req.sampling_params.custom_params, config)
    if options.dense:
        return DENSE
    return SparseFrom(
        prefill=config.prefill.sparse_from,
        # A decode step counts the token that it decodes.
        decode=config.min_sparse_tokens - 1,
        budget=(options.budget or config.budget).amount,
    )
