# SPDX-License-Identifier: Apache-2.0
"""Frames on the device for blocks of KV that lie in host memory, replaced by recency."""

from .api import (
    begin_step,
    fill_pages,
    find_frames,
    flush_pages,
    load_blocks,
    pin_pages,
    read_pages,
    release_pages,
    store_tokens,
    write_pages,
)
from .types import COUNTERS, FoundFrames, FrameDemand, FramePool, make_host_blocks

__all__ = [
    "COUNTERS",
    "FoundFrames",
    "FrameDemand",
    "FramePool",
    "begin_step",
    "fill_pages",
    "find_frames",
    "flush_pages",
    "load_blocks",
    "make_host_blocks",
    "pin_pages",
    "read_pages",
    "release_pages",
    "store_tokens",
    "write_pages",
]
