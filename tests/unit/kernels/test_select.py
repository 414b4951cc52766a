# SPDX-License-Identifier: Apache-2.0
"""Top-k selection: the definition against Python's sort, the kernel equal to the definition."""

import itertools
import math

import pytest
import torch
from kernel_cases import DEVICE, FAR, IMPLS, NAN, Batch

from sglang_sparse_kernels import (
    Always,
    Scores,
    TopkWorkspace,
    find_block_max,
    make_topk_workspace,
    padded_blocks,
    select_topk,
)
from sglang_sparse_kernels.select import kernel, one_program, split, stream

STALE = -7
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def rows_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of few rows reach the kernels of many; the test of shared rows asks for parts."""
    monkeypatch.setattr(kernel, "num_splits", lambda *_: 0)


def naive_topk(scores: list[float], kept: int, below: int, start: int) -> list[int]:
    """The k first of: forced units, then larger scores, then lower indices.

    NaN is -inf, +inf the largest finite number.
    """

    def rank(index: int) -> tuple[bool, float, int]:
        forced = index < below or index >= start
        score = float("-inf") if math.isnan(scores[index]) else min(scores[index], LARGEST)
        return (not forced, 0.0 if forced else -score, index)

    return sorted(sorted(range(len(scores)), key=rank)[:kept])


def random_scores(batch: Batch, kind: str, width: int) -> torch.Tensor:
    """Scores of one kind in every row's domain, NaN past it."""
    shape = (len(batch.lengths), batch.heads, width)
    scores = batch.randn(*shape)
    if kind == "ties":
        scores = (scores * 2).round() / 2
    elif kind == "grid":
        scores = (scores * 16).round() / 16
    elif kind == "constant":
        scores.fill_(-1.5)
    elif kind == "none":
        scores.fill_(float("-inf"))
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "infinite":
        scores = torch.where(scores > 1.5, float("inf"), scores)
        scores = torch.where((scores > 0.8) & (scores < 1.5), LARGEST, scores)
        scores = torch.where(scores < 0, float("-inf"), scores)
    elif kind == "clustered":
        scores = scores * 1e-3 + torch.linspace(0, 1e6, width)
    elif kind == "tiny":
        scores = scores * 1e-41
    elif kind == "hidden":
        scores = torch.where(scores > 1.2, NAN, scores)
    for row in range(len(batch.lengths)):
        scores[row, :, -(-int(batch.plan.tail_start[row]) // batch.unit) :] = NAN
    return scores.to(DEVICE)


def select(
    batch: Batch,
    scores: torch.Tensor,
    impl: str,
    workspace: TopkWorkspace | None = None,
    *,
    sink: int,
    recent: int,
) -> tuple:
    shape = (batch.list_rows, batch.heads)
    indices = torch.full((*shape, batch.capacity), STALE, dtype=torch.int32, device=DEVICE)
    counts = torch.full(shape, STALE, dtype=torch.int32, device=DEVICE)
    if workspace is None:
        rows = len(batch.lengths) + 1
        workspace = make_topk_workspace(rows, batch.heads, scores.shape[2], batch.capacity, DEVICE)
    workspace.blocks.fill_(FAR)
    workspace.state.fill_(FAR)
    workspace.candidate_scores.fill_(NAN)
    workspace.candidate_units.fill_(FAR)
    # Scores from elsewhere: the test's own stay as they are.
    blocks = torch.full((*scores.shape[:2], padded_blocks(scores.shape[2])), NAN, device=DEVICE)
    found = Scores(scores.clone(), blocks)
    find_block_max(found, batch.plan, unit=batch.unit, impl=impl)
    select_topk(
        found, batch.plan, batch.lists(indices, counts), always=Always(sink, recent),
        workspace=workspace, impl=impl,
    )  # fmt: skip
    return indices, counts


def check_lists(batch: Batch, scores: torch.Tensor, got: tuple, sink: int, recent: int) -> None:
    indices, counts = got
    plan, touched = batch.plan, set()
    for row in range(len(batch.lengths)):
        target = int(plan.request_slots[row])
        if plan.reselect[row] == 0:
            continue
        touched.add(target)
        tokens, kept = int(plan.tail_start[row]), int(plan.k_units[row])
        units = -(-tokens // batch.unit)
        below, start = -(-sink // batch.unit), max(0, tokens - recent) // batch.unit
        for head in range(batch.heads):
            want = naive_topk(scores[row, head, :units].tolist(), kept, below, start)
            assert int(counts[target, head]) == kept
            assert indices[target, head, :kept].tolist() == want
    for target in set(range(batch.list_rows)) - touched:
        assert (counts[target] == STALE).all()
        assert (indices[target] == STALE).all()


KINDS = ("normal", "ties", "constant", "zeros", "infinite", "clustered", "tiny", "hidden")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lengths", "budget", "unit", "sink", "recent"),
    [
        ([257, 1, 111], 40, 1, 4, 8),
        ([700, 63], 17, 1, 0, 0),
        ([100, 2], 99, 1, 16, 1),
        ([1030, 130, 640], 160, 16, 20, 33),
    ],
)
def test_lists_equal_a_sort(
    impl: str, kind: str, lengths: list[int], budget: int, unit: int, sink: int, recent: int
) -> None:
    batch = Batch(
        lengths, unit=unit, budget=budget, capacity=max(budget // unit, 8), dense_rows=(1,),
        seed=KINDS.index(kind),
    )  # fmt: skip
    scores = random_scores(batch, kind, -(-max(lengths) // unit) + 5)
    got = select(batch, scores, impl, sink=sink, recent=recent)
    check_lists(batch, scores, got, sink, recent)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_between_selections_keep_their_lists(impl: str) -> None:
    batch = Batch([99, 100, 102, 103], reselect_every=3, seed=2)
    assert sorted(batch.plan.reselect.tolist()) == [0, 0, 1, 1]
    scores = random_scores(batch, "normal", 110)
    check_lists(batch, scores, select(batch, scores, impl, sink=2, recent=3), 2, 3)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_reselected_row_without_budget_gets_an_empty_list(impl: str) -> None:
    batch = Batch([100, 90], seed=3)
    batch.plan.k_units[1] = 0
    scores = random_scores(batch, "normal", 110)
    _, counts = select(batch, scores, impl, sink=2, recent=3)
    assert (counts[batch.plan.request_slots[1]] == 0).all()
    assert (counts[batch.plan.request_slots[0]] == 40).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_fewer_slots_than_forced_units_keep_the_lowest(impl: str) -> None:
    batch = Batch([100], budget=6, capacity=6, seed=4)
    scores = random_scores(batch, "normal", 110)
    check_lists(batch, scores, select(batch, scores, impl, sink=4, recent=8), 4, 8)


@pytest.mark.parametrize(
    ("kind", "tiles"),
    [
        *itertools.product(("normal", "ties", "hidden"), ((512, 512, 4), (1024, 512, 4))),
        ("infinite", (1024, 512, 4)),
        ("ties", (64, 512, 4)),
    ],
    ids=str,
)
def test_tiles_of_any_size_give_the_same_lists(
    kind: str, tiles: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles too small for the row are streamed, others prune in either of two sizes."""
    monkeypatch.setattr(kernel, "_tiles", lambda *_: tiles)
    small_streams(monkeypatch)
    batch = Batch([1500, 700, 200], budget=50, heads=1, capacity=80, seed=5)
    scores = random_scores(batch, kind, 1501 + 3 * (tiles[0] == 64))
    check_lists(batch, scores, select(batch, scores, "triton", sink=4, recent=9), 4, 9)


def small_streams(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Rows of a thousand units in several parts of several tiles."""
    small = {"STREAM_UNITS": 512, "TILE_UNITS": 64, "CHUNK": 4, "MOST_BETWEEN": 16}
    small |= {"FEW_LISTED": 128, "MOST_LISTED": 256} | sizes
    for name, value in small.items():
        monkeypatch.setattr(stream, name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_budgets_that_do_not_fit_in_registers_are_streamed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_tiles", lambda *_: (512, 256, 4))
    small_streams(monkeypatch)
    budget = (300, 800, 1190)[KINDS.index(kind) % 3]
    batch = Batch([1200, 901], budget=budget, heads=1, capacity=budget + 10, seed=7, dense_rows=())
    scores = random_scores(batch, kind, 1204)
    got = select(batch, scores, "triton", sink=4, recent=9)
    check_lists(batch, scores, got, 4, 9)


@pytest.mark.parametrize(
    ("kind", "few", "sample", "done"),
    [
        ("grid", 1024, 8192, True),
        ("normal", 256, 8192, True),
        ("clustered", 256, 8192, False),
        ("constant", 256, 8192, True),
        # Some 1,800 units lie between the bounds of so small a sample.
        ("normal", 256, 1024, True),
        ("infinite", 256, 1024, True),
    ],
)
def test_parts_share_a_row_and_one_program_takes_what_they_cannot(
    kind: str, few: int, sample: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_tiles", lambda *_: (512, 256, 4))
    small_streams(
        monkeypatch, STREAM_UNITS=sample, TILE_UNITS=256, MOST_BETWEEN=64, FEW_LISTED=few,
        MOST_LISTED=1024,
    )  # fmt: skip
    batch = Batch([12_000], budget=1500, heads=1, capacity=1500, seed=8, dense_rows=())
    scores = random_scores(batch, kind, 12_000)
    workspace = make_topk_workspace(1, 1, 12_000, 1500, DEVICE)
    got = select(batch, scores, "triton", workspace, sink=4, recent=9)
    check_lists(batch, scores, got, 4, 9)
    assert workspace.state[0, 0, one_program.DONE.value] == done


WHOLE, BLOCKS, SAMPLE = (1024, 1024), (256, 1024), (256, 64)


@pytest.mark.parametrize(
    ("kind", "looked_at"),
    [
        *zip(KINDS, (BLOCKS, WHOLE, BLOCKS, SAMPLE, BLOCKS, BLOCKS, SAMPLE, BLOCKS), strict=True),
        ("normal", WHOLE),
        ("normal", SAMPLE),
    ],
    ids=str,
)
def test_several_programs_share_few_rows(
    kind: str, looked_at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows looked at whole, by all block maxima or by a sample of them; parts of several tiles."""
    monkeypatch.setattr(kernel, "num_splits", lambda *_: 2)
    sizes = {"WHOLE_UNITS": looked_at[0], "MAX_BLOCKS": looked_at[1]}
    sizes |= {"TILE_UNITS": 128, "FALLBACK_UNITS": 256, "LEAST_BUDGET": 16, "WRITE_UNITS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(split, name, value)
    batch = Batch(
        [1101, 90, 300], budget=60, heads=1, capacity=80, dense_rows=(1,),
        seed=KINDS.index(kind) + looked_at[1],
    )  # fmt: skip
    scores = random_scores(batch, kind, 1101 + 3 * (looked_at == SAMPLE))
    check_lists(batch, scores, select(batch, scores, "triton", sink=4, recent=9), 4, 9)


@pytest.mark.parametrize(
    ("kind", "shared"), [("normal", True), ("constant", True), ("none", False)]
)
def test_a_row_that_parts_cannot_list_is_taken_by_one_program(
    kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "num_splits", lambda *_: 2)
    batch = Batch([1000], budget=40, heads=1, capacity=40, seed=9, dense_rows=())
    scores = random_scores(batch, kind, 1000)
    workspace = make_topk_workspace(1, 1, 1000, 40, DEVICE)
    got = select(batch, scores, "triton", workspace, sink=4, recent=9)
    check_lists(batch, scores, got, 4, 9)
    found = workspace.state[0, 0, split.CANDIDATES.value :][:2]
    assert bool(found.sum() <= 1000) == shared


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_from_elsewhere_become_numbers_with_their_block_maxima(impl: str) -> None:
    batch = Batch([257, 1, 111], unit=1, seed=6)
    for kind in ("hidden", "infinite", "none"):
        values = random_scores(batch, kind, 300)
        blocks = torch.full((*values.shape[:2], padded_blocks(300)), STALE, device=DEVICE).float()
        scores = Scores(values.clone(), blocks)
        find_block_max(scores, batch.plan, unit=1, impl=impl)
        largest = torch.finfo(torch.float32).max
        for row, length in enumerate(batch.lengths):
            tail = length - 1 if batch.plan.k_units[row] else 0
            want = values[row, :, :tail].nan_to_num(-math.inf, largest, -math.inf)
            assert torch.equal(scores.values[row, :, :tail], want)
            assert scores.values[row, :, tail:].isnan().all()
            best = [part.amax(-1) for part in want.split(8, -1)] if tail else []
            for j, expected in enumerate(best):
                assert torch.equal(scores.block_max[row, :, j], expected)
            assert (scores.block_max[row, :, len(best) :] == STALE).all()
