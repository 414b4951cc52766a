# SPDX-License-Identifier: Apache-2.0
"""The frame pool and a lookup's scratch as kernels take them."""

from typing import NamedTuple

import torch


class PoolArgs(NamedTuple):
    """A :class:`.types.FramePool`; ``first_block`` is the number of its layer's first block.

    ``arriving`` may be None.
    """

    frame_of: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    order: torch.Tensor
    clock: torch.Tensor
    cursor: torch.Tensor
    counters: torch.Tensor
    arriving: torch.Tensor | None
    cached: int
    first_block: int


class FoundArgs(NamedTuple):
    """A :class:`.types.FoundFrames`; its rows are the batch's rows times KV heads."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    k_units: torch.Tensor
    request_slots: torch.Tensor
    list_rows: torch.Tensor
    pages: torch.Tensor
    blocks: torch.Tensor
    ranks: torch.Tensor
    before: torch.Tensor
    counted: torch.Tensor
    missing: torch.Tensor
    victims: torch.Tensor
    num_missing: torch.Tensor
    stride_table: int
