# SPDX-License-Identifier: Apache-2.0
"""Layers that reuse a selection, with KV in host memory: on a GPU a start refuses them."""

from __future__ import annotations

import pytest
import torch
from host_kv_harness import BUDGETS, make_config

from sglang_sparse.backend.hosted import check_reuse
from sglang_sparse.config import ConfigError


def test_layers_that_reuse_a_selection_are_refused_on_a_gpu() -> None:
    reuse = make_config(**BUDGETS["reuse"])
    with pytest.raises(ConfigError, match=r"layers.kind=anchors.*layer 1 reuses.*kind to every"):
        check_reuse(reuse, range(3), torch.device("cuda"))
    check_reuse(reuse, range(3), torch.device("cpu"))
    check_reuse(reuse, range(1), torch.device("cuda"))
    check_reuse(make_config(), range(3), torch.device("cuda"))
