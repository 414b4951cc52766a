# SPDX-License-Identifier: Apache-2.0
"""SGLang's helpers of chains in PyTorch, against loops."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.compat.v0517.cpu_speculation import (
    assign_rows,
    chain_indices,
    extend_slots,
    verify_greedy,
)


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("a CPU tensor reached a kernel of a GPU")


def test_slots_are_written_to_and_read_from_the_rows_of_their_requests() -> None:
    table = torch.zeros((5, 12), dtype=torch.int32)
    rows, start, end = torch.tensor([3, 1]), torch.tensor([2, 7]), torch.tensor([6, 9])
    slots = torch.arange(40, 46)
    assign_rows(never, rows, table, start, end, slots, 2)
    assert table[3, 2:6].tolist() == [40, 41, 42, 43]
    assert table[1, 7:9].tolist() == [44, 45]
    assert int((table > 0).sum()) == 6
    found = extend_slots(
        never, rows, table, start, end, batch_size=2, draft_token_num=4, device="cpu"
    )
    assert found.dtype == torch.int64
    assert found.tolist() == slots.tolist()


def test_drafts_are_accepted_up_to_the_first_that_the_model_would_not_decode() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width = 200, 5
    candidates = torch.randint(3, (rows, width), generator=generator)
    target = torch.randint(3, (rows, width), generator=generator)
    predicts = torch.full((rows * width,), -7, dtype=torch.int32)
    index = torch.full((rows, width), -7, dtype=torch.int32)
    counts = torch.full((rows,), -7, dtype=torch.int32)
    verify_greedy(never, predicts, index, counts, candidates, target_predict=target)
    for row in range(rows):
        accepted = 0
        while accepted < width - 1 and candidates[row, accepted + 1] == target[row, accepted]:
            accepted += 1
        assert int(counts[row]) == accepted
        kept = [row * width + at for at in range(accepted + 1)]
        assert index[row].tolist() == kept + [-1] * (width - 1 - accepted)
        assert predicts[kept].tolist() == target[row, : accepted + 1].tolist()
    assert set(counts.tolist()) == set(range(width))


def test_a_chain_has_consecutive_positions_and_a_tree_is_refused() -> None:
    rows, width = 2, 3
    mask = torch.ones((width, width), dtype=torch.bool).tril().repeat(rows, 1, 1)
    positions = torch.full((rows * width,), -7)
    links = [torch.full((rows, width), -7) for _ in range(3)]
    chain_indices(mask.flatten(), torch.tensor([10, 4]), positions, *links, rows, width)
    assert positions.tolist() == [10, 11, 12, 4, 5, 6]
    assert links[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert links[1].tolist() == [[1, 2, -1]] * rows
    assert links[2].tolist() == [[-1, -1, -1]] * rows
    mask[1, 2, 1] = False
    with pytest.raises(ValueError, match="are a tree"):
        chain_indices(mask.flatten(), torch.tensor([10, 4]), positions, *links, rows, width)
