# SPDX-License-Identifier: Apache-2.0
"""Placement `device`: keys and values lie in SGLang's KV pool on the device."""

from typing import Literal

from sglang_sparse.choices.placement._placement import PlacementChoice


class OnDevice(PlacementChoice):
    """All keys and values lie on the device."""

    kind: Literal["device"] = "device"
