# SPDX-License-Identifier: Apache-2.0
"""Decode attention over selected units and a contiguous tail."""

from .api import gathered_decode_attention
from .types import MAX_QUERIES, make_workspace

__all__ = ["MAX_QUERIES", "gathered_decode_attention", "make_workspace"]
