# SPDX-License-Identifier: Apache-2.0
"""Lists that nobody reads, those of streaming heads: neither scored nor selected."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import DEVICE, IMPLS, PYTORCH, Batch, random_kinds

from sglang_sparse_kernels import (
    Always,
    Scores,
    exact_score,
    make_exact_workspace,
    make_topk_workspace,
    padded_blocks,
    page_minmax_score,
    select_topk,
    sketch_score,
)
from sglang_sparse_kernels.score import page_bounds
from sglang_sparse_kernels.select import kernel as select_kernel

STALE = -77


Score = Callable[[Batch, Scores, str], None]


def by_pages(batch: Batch, scores: Scores, impl: str) -> None:
    cuboids = batch.cuboids(batch.make_planes(None, True))
    page_minmax_score(batch.q, cuboids, batch.plan, reduce="max", out=scores, impl=impl)


def by_sketch(batch: Batch, scores: Scores, impl: str) -> None:
    sketch = batch.sketch(batch.make_planes("fp8", False))
    channels = torch.zeros((batch.list_rows, batch.heads, 8), dtype=torch.int32, device=DEVICE)
    sketch_score(
        batch.q, channels, sketch, batch.plan, reduce="sum", out=scores, choose_channels=True,
        impl=impl,
    )  # fmt: skip
    if scores.unread is not None:
        assert (channels[:, scores.unread != 0] == 0).all()


def by_attention(batch: Batch, scores: Scores, impl: str) -> None:
    rows, heads = len(batch.lengths), batch.heads
    workspace = make_exact_workspace(
        rows, heads * batch.group, heads, scores.values.shape[2], DEVICE
    )
    pool = "group" if scores.values.shape[1] == heads else "heads"
    exact_score(
        batch.q, batch.kv, batch.plan, softmax=batch.softmax(), pool=pool, out=scores,
        workspace=workspace, impl=impl,
    )  # fmt: skip


def empty_scores(batch: Batch, lists: int, unread: torch.Tensor | None) -> Scores:
    width = -(-batch.max_pages * batch.page_size // batch.unit)
    shape = (len(batch.lengths), lists)
    values = torch.full((*shape, width), float(STALE), device=DEVICE)
    blocks = torch.full((*shape, padded_blocks(width)), float(STALE), device=DEVICE)
    return Scores(values, blocks, unread)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("score", "unit", "lists"),
    [(by_pages, 16, 5), (by_sketch, 1, 5), (by_attention, 1, 5), (by_attention, 1, 1)],
)
def test_lists_that_nobody_reads_are_not_scored(
    impl: str, score: Score, unit: int, lists: int
) -> None:
    batch = Batch(
        [257, 1, 130, 300], unit=unit, heads=5, group=2, page_size=32, shared_pages=1, seed=unit
    )
    unread = random_kinds(batch) if lists > 1 else torch.ones(1, dtype=torch.int32, device=DEVICE)
    whole, part = empty_scores(batch, lists, None), empty_scores(batch, lists, unread)
    score(batch, whole, impl)
    score(batch, part, impl)
    skipped = unread != 0
    assert (whole.values[:, skipped] != STALE).any()
    assert (part.values[:, skipped] == STALE).all()
    assert (part.block_max[:, skipped] == STALE).all()
    assert torch.equal(part.values[:, ~skipped], whole.values[:, ~skipped])
    assert torch.equal(part.block_max[:, ~skipped], whole.block_max[:, ~skipped])


@pytest.mark.parametrize("impl", IMPLS)
def test_bounds_of_lists_that_nobody_reads_are_not_found(impl: str) -> None:
    batch = Batch([257, 130], unit=16, heads=5, group=2, page_size=32)
    cuboids, unread = batch.cuboids(batch.make_planes(None, True)), random_kinds(batch)
    skipped = unread != 0
    width = -(-batch.max_pages * batch.page_size // 16)
    whole, part = (torch.full((2, 5, 2, width), float(STALE), device=DEVICE) for _ in "ab")
    page_bounds(batch.q, cuboids, batch.plan, out=whole, impl=impl)
    page_bounds(batch.q, cuboids, batch.plan, out=part, unread=unread, impl=impl)
    assert (part[:, skipped] == STALE).all()
    assert (whole != STALE).any(-1).all()
    assert torch.equal(part[:, ~skipped], whole[:, ~skipped])


@pytest.mark.parametrize(
    ("impl", "form"),
    [
        *((impl, "") for impl in PYTORCH),
        ("triton", "one program"),
        ("triton", "several"),
        ("triton", "streamed"),
    ],
)
def test_lists_that_nobody_reads_are_not_selected(
    impl: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form that the top-k has."""
    monkeypatch.setattr(select_kernel, "num_splits", lambda *_: 4 if form == "several" else 0)
    if form == "streamed":
        monkeypatch.setattr(select_kernel, "_tiles", lambda *_: (512, 128, 4))
    batch = Batch([900, 1, 333], heads=5, budget=200, capacity=200, seed=5)
    unread = random_kinds(batch)
    skipped = unread != 0
    scores = batch.randn(3, 5, batch.max_pages * batch.page_size).to(DEVICE)
    blocks = scores.unflatten(2, (-1, 8)).amax(3)
    padded = torch.nn.functional.pad(blocks, (0, padded_blocks(scores.shape[2]) - blocks.shape[2]))

    def select(unread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch.list_rows, batch.heads)
        indices = torch.full((*shape, batch.capacity), STALE, dtype=torch.int32, device=DEVICE)
        counts = torch.full(shape, STALE, dtype=torch.int32, device=DEVICE)
        workspace = make_topk_workspace(3, 5, scores.shape[2], batch.capacity, DEVICE)
        select_topk(
            Scores(scores, padded.contiguous(), unread), batch.plan, batch.lists(indices, counts),
            always=Always(4, 8), workspace=workspace, impl=impl,
        )  # fmt: skip
        return indices, counts

    (indices, counts), (every, counted) = select(unread), select(None)
    used = batch.plan.request_slots.long()
    assert (counted[used[0]] == 200).all()
    assert (counts[:, skipped] == STALE).all()
    assert (indices[:, skipped] == STALE).all()
    assert torch.equal(counts[:, ~skipped], counted[:, ~skipped])
    assert torch.equal(indices[:, ~skipped], every[:, ~skipped])
