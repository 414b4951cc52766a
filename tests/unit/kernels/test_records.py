# SPDX-License-Identifier: Apache-2.0
"""The records in which arguments travel: where positions lie, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE, Batch

from sglang_sparse_kernels import Always, KVView, Lists, Scores, make_scores, padded_blocks


def test_a_view_finds_every_position_where_sglang_put_it() -> None:
    batch = Batch([257, 111, 30], page_size=32, shared_pages=1)
    for row, length in enumerate(batch.lengths):
        at = torch.arange(length, device=DEVICE)
        want = batch.req_to_token[batch.req_slots[row], :length].long()
        assert torch.equal(batch.kv.slots(row, at), want)
        assert torch.equal(batch.kv.slots(row, at.view(1, -1)), want.view(1, -1))


def test_scores_of_fewer_rows_share_their_memory() -> None:
    scores = make_scores(4, 2, 300, DEVICE)
    part = scores.rows(3)
    assert part.values.data_ptr() == scores.values.data_ptr()
    assert part.block_max.shape == (3, 2, padded_blocks(300))
    part.check(3, 2)
    part.check_triton()


def lists(**changes: object) -> Lists:
    indices = torch.zeros((5, 2, 7), dtype=torch.int32, device=DEVICE)
    whole = Lists(indices, indices[..., 0].contiguous(), indices[:3, 0, 0].contiguous())
    return replace(whole, **changes)


def view(**changes: object) -> KVView:
    return replace(Batch([100], dim=64).kv, **changes)


Q = torch.zeros((1, 4, 64), dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: Always(sink=-1), "sink=-1"),
        (lambda: lists(unit=0).check_written(3), "unit=0 must be at least 1"),
        (lambda: lists().check_written(4), "rows of lists has shape"),
        (lambda: lists().check_read(3, 4), "indices has shape"),
        (lambda: lists(head_map=lists().counts[0].long()).check_read(3, 2), "head_map is"),
        (lambda: view(page_size=48).group_of(Q), "page_size=48 is not one of"),
        (lambda: view().group_of(Q[:, :3]), "3 query heads do not divide over 2 KV heads"),
        (lambda: view().check_triton(Q.float()), "q is torch.float32"),
        (lambda: view(k=view().k.float()).check_triton(Q), "k is torch.float32"),
        (lambda: view().check_triton(Q.repeat(1, 10, 1)), "20 query heads a KV head at most 16"),
        (lambda: make_scores(2, 1, 9, "cpu").check(2, 2), "scores has shape"),
        (lambda: Scores(torch.zeros(1, 1, 9), torch.zeros(1, 1, 1)).check_triton(), "block_max"),
    ],
)
def test_what_does_not_fit_is_named(refused: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refused()
