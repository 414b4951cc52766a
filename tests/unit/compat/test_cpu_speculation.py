# SPDX-License-Identifier: Apache-2.0
"""SGLang's helpers of chains in PyTorch, against loops."""

from types import SimpleNamespace

import pytest
import torch

from sglang_sparse.compat.cpu_speculation import (
    assign_rows,
    build_chains,
    chain_indices,
    draft_slots,
    draft_window,
    extend_chains,
    extend_slots,
    get_last_loc,
    last_accepted,
    prepare_copies,
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


def test_chains_to_verify_begin_with_the_last_accepted_token() -> None:
    bonus = torch.tensor([7, 8], dtype=torch.int32)
    drafts = torch.tensor([[20, 21, 22], [30, 31, 32]])
    lengths = torch.tensor([10, 4])
    mask, positions, index, following, sibling, tokens = build_chains(
        never, bonus, drafts[:0], drafts[:0], drafts, lengths, 14, 1, 3, 4, fill_prefix_mask=True
    )
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [7, 20, 21, 22, 8, 30, 31, 32]
    assert positions.tolist() == [10, 11, 12, 13, 4, 5, 6, 7]
    assert mask.view(2, 4, 4).tolist() == [torch.ones(4, 4).tril().bool().tolist()] * 2
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2
    with pytest.raises(ValueError, match="are a tree"):
        build_chains(never, bonus, drafts[:0], drafts[:0], drafts, lengths, 14, 2, 3, 4)


def test_a_chain_goes_on_as_sglang_would_let_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_utils

    # Undo its compilation, which is what the replacement saves.
    compiled = spec_utils._select_top_k_tokens_later
    monkeypatch.setattr(
        spec_utils, compiled.__name__, getattr(compiled, "_torchdynamo_orig_callable", compiled)
    )
    original = getattr(
        spec_utils.select_top_k_tokens, "__wrapped__", spec_utils.select_top_k_tokens
    )
    generator = torch.Generator().manual_seed(0)
    ours = theirs = None
    for step in range(4):
        p = torch.rand((5, 1), generator=generator)
        token = torch.randint(99, (5, 1), generator=generator)
        found = extend_chains(original, step, p, token, None, ours, 1)
        want = original(step, p, token, None, theirs, 1)
        ours, theirs = found[2], want[2]
        assert found[1] is want[1] is None
        for a, b in zip([found[0], ours, *found[3]], [want[0], theirs, *want[3]], strict=True):
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()


def test_the_token_behind_the_accepted_drafts_is_taken() -> None:
    tokens = torch.arange(12, dtype=torch.int32)
    found = torch.full((3,), -7, dtype=torch.int32)
    last_accepted(never, tokens, torch.tensor([1, 4, 2], dtype=torch.int32), found, 4, 3)
    assert found.tolist() == [0, 7, 9]


def test_drafts_are_written_behind_their_rows() -> None:
    table = torch.arange(48, dtype=torch.int32).view(4, 12)
    found = torch.full((6,), -7)
    draft_slots(torch.tensor([2, 0]), table, torch.tensor([5, 9]), found, 12, 1, 3)
    assert found.tolist() == [29, 30, 31, 9, 10, 11]
    again = torch.full((6,), -7)
    draft_window(never, torch.tensor([2, 0]), table, torch.tensor([5, 9]), again, 1, 3)
    assert again.tolist() == found.tolist()


def test_elsewhere_sglangs_own_functions_take_what_they_are_given() -> None:
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def original(*args: object, **kwargs: object) -> None:
        asked.append((args, kwargs))

    def empty() -> torch.Tensor:
        return torch.empty(3, device="meta")

    slots = (empty(), empty(), empty(), empty(), 1, 3)
    positions = empty()
    draft_window(original, *slots, positions=positions)
    rows = (empty(), empty(), empty())
    get_last_loc(original, *rows)
    pool = SimpleNamespace(device="cuda")
    prepare_copies(original, pool)
    given = [slots, rows, (pool,)]
    assert [[id(one) for one in args] for args, _ in asked] == [[*map(id, one)] for one in given]
    assert [kwargs.keys() for _, kwargs in asked] == [{"positions"}, set(), set()]
    assert asked[0][1]["positions"] is positions


def test_the_last_slot_of_a_prefix_and_a_pool_that_moves_no_rows() -> None:
    table = torch.arange(48, dtype=torch.int32).view(4, 12)
    found = get_last_loc(never, table, torch.tensor([2, 0, 1]), torch.tensor([5, 0, 12]))
    assert found.tolist() == [28, -1, 23]
    pool = SimpleNamespace(device="cpu")
    prepare_copies(never, pool)
    assert pool._kv_copy_config is None
