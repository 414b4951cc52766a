# SPDX-License-Identifier: Apache-2.0
"""What a request may not ask for where draft tokens are verified on a CPU."""

import json
from collections.abc import Mapping
from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import refuse
from sglang_sparse.speculation.flags import algorithm

_GREEDY_BELOW = 1e-6  # SGLang takes a lower temperature for greedy


def check_greedy(sampling_params: Mapping[str, Any], server_args: Any) -> None:
    """Refuse a request that would sample, where only greedy verification is at hand.

    SGLang samples among draft tokens by a CUDA kernel.

    Args:
        sampling_params: as the client sent them.
        server_args: SGLang's ``ServerArgs``.

    Raises:
        ConfigError: the request is not greedy, on a CPU that speculates.
    """
    flags = compat.resolved(server_args)
    if algorithm(flags) is None or flags.device != "cpu":
        return
    preferred = flags.preferred_sampling_params or {}
    if isinstance(preferred, str):
        preferred = json.loads(preferred)
    params = {"temperature": 1.0, **preferred, **sampling_params}
    temperature = params["temperature"]
    if params.get("top_k") == 1 or (temperature is not None and temperature < _GREEDY_BELOW):
        return
    raise refuse(
        "temperature",
        temperature,
        "0, or top_k 1, where --speculative-algorithm verifies on a CPU",
        "ask for temperature 0, or serve without speculation",
    )
