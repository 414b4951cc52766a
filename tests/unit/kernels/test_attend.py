# SPDX-License-Identifier: Apache-2.0
"""Decode attention: the definition against plain softmax, the kernel against float64."""

from dataclasses import replace

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, assert_within_budget
from kernel_cases import DEVICE, FAST, IMPLS, NAN, PYTORCH, Batch

from sglang_sparse_kernels import (
    Softmax,
    TokenTable,
    gathered_decode_attention,
    make_workspace,
    snapshot_page_table,
)
from sglang_sparse_kernels.common import take

# lengths, page size, heads, group, dim, dtype, unit, cadence
CASES = [
    ([257, 1, 111, 30, 63], 64, 2, 1, 64, torch.bfloat16, 1, 1),
    ([1, 130, 511], 32, 1, 2, 128, torch.float16, 1, 4),
    ([63, 300], 16, 1, 3, 64, torch.bfloat16, 16, 1),
    ([111, 49, 257], 64, 2, 4, 128, torch.bfloat16, 16, 3),
    ([700, 20], 32, 1, 8, 64, torch.float16, 1, 1),
    ([257], 16, 1, 16, 64, torch.bfloat16, 1, 5),
]


def make_batch(case: tuple, **options: object) -> Batch:
    lengths, page_size, heads, group, dim, dtype, unit, cadence = case
    settings = {
        "page_size": page_size,
        "heads": heads,
        "group": group,
        "dim": dim,
        "dtype": dtype,
        "unit": unit,
        "reselect_every": cadence,
        "shared_pages": 1,
        "dense_rows": (len(lengths) - 1,) if len(lengths) > 2 else (),
        "seed": sum(lengths) + dim,
    }
    return Batch(lengths, **settings | options)


def naive_attention(
    batch: Batch, lists: tuple, dtype: torch.dtype, logit_cap: float = 0.0
) -> torch.Tensor:
    """Softmax over the visible positions, one row and head at a time, in ``dtype``."""
    indices, counts = lists
    plan, size, out = batch.plan, batch.page_size, torch.zeros_like(batch.q, dtype=dtype)
    for row in range(len(batch.lengths)):
        tail, target = int(plan.tail_start[row]), int(plan.request_slots[row])
        for head in range(batch.heads):
            seen = []
            if plan.k_units[row] > 0:
                for unit in indices[target, head, : int(counts[target, head])].tolist():
                    first = unit * batch.unit
                    seen += range(first, min(first + batch.unit, tail))
            seen += range(tail, batch.lengths[row])
            at = torch.tensor(seen, device=DEVICE)
            slots = plan.page_table[row].long()[at // size] * size + at % size
            mine = slice(head * batch.group, (head + 1) * batch.group)
            query = batch.q[row, mine].to(dtype)
            logits = query @ take(batch.k[0], (slots, head)).to(dtype).T * batch.logit_scale
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            values = take(batch.v[0], (slots, head)).to(dtype)
            out[row, mine] = logits.softmax(-1) @ values * batch.scales.v
    return out


def attend(batch: Batch, lists: tuple, impl: str, logit_cap: float = 0.0) -> torch.Tensor:
    out = torch.full_like(batch.q, NAN)
    workspace = make_workspace(
        len(batch.lengths), batch.heads * batch.group, batch.heads, batch.dim, DEVICE
    ).fill_(NAN)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, batch.lists(*lists), softmax=batch.softmax(logit_cap),
        out=out, workspace=workspace, impl=impl,
    )  # fmt: skip
    return out


def rounding(dtype: torch.dtype) -> float:
    """What the kernel rounds that an eager softmax does not, relative to the output's norm.

    Probabilities are cast to ``dtype`` before they meet V, at a running maximum that may differ
    from the final one (one unit roundoff each), and the output is rounded once more.
    """
    return 3 * UNIT_ROUNDOFF[dtype]


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("logit_cap", [0.0, 2.0])
def test_definition_equals_plain_softmax(case: tuple, logit_cap: float, impl: str) -> None:
    batch = make_batch(case)
    batch.q, batch.k, batch.v = (
        batch.q.double(),
        [k.double() for k in batch.k],
        [v.double() for v in batch.v],
    )
    lists = batch.random_lists()
    want = naive_attention(batch, lists, torch.float64, logit_cap)
    torch.testing.assert_close(attend(batch, lists, impl, logit_cap), want)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_kernel_is_within_the_error_budget_of_float64(
    case: tuple, logit_cap: float, impl: str
) -> None:
    batch = make_batch(case)
    lists = batch.random_lists()
    exact = naive_attention(batch, lists, torch.float64, logit_cap)
    eager = naive_attention(batch, lists, batch.dtype, logit_cap)
    got = attend(batch, lists, impl, logit_cap)
    for row in range(len(batch.lengths)):
        assert_within_budget(got[row], exact[row], eager[row], rounding(batch.dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("unit", [1, 16])
def test_a_budget_above_the_context_equals_dense(impl: str, unit: int) -> None:
    case = ([111, 63, 200], 32, 2, 2, 64, torch.bfloat16, unit, 3)
    sparse = make_batch(case, budget=10_000, capacity=200, dense_rows=())
    dense = make_batch(case, budget=10_000, capacity=200, dense_rows=(0, 1, 2))
    assert (sparse.plan.k_units > 0).all()
    assert (dense.plan.k_units == 0).all()
    got = attend(sparse, sparse.random_lists(), impl)
    exact = naive_attention(dense, dense.random_lists(), torch.float64)
    eager = naive_attention(dense, dense.random_lists(), dense.dtype)
    assert_within_budget(got, exact, eager, rounding(dense.dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_counts_may_differ_between_heads_and_be_zero(impl: str) -> None:
    batch = make_batch(([111, 200], 32, 3, 2, 64, torch.bfloat16, 1, 2))
    indices, counts = batch.random_lists()
    counts[batch.plan.request_slots[0].long()] = torch.tensor([0, 7, 40], dtype=torch.int32).to(
        DEVICE
    )
    exact = naive_attention(batch, (indices, counts), torch.float64)
    eager = naive_attention(batch, (indices, counts), batch.dtype)
    got = attend(batch, (indices, counts), impl)
    assert_within_budget(got, exact, eager, rounding(batch.dtype))


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits_gives_the_same_attention(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sparse_kernels.attend import kernel

    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    batch = make_batch(([511, 1, 70], 64, 1, 4, 64, torch.bfloat16, 1, 1))
    lists = batch.random_lists()
    out = torch.full_like(batch.q, NAN)
    workspace = torch.full((3 * 4 * splits * 65,), NAN, device=DEVICE)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, batch.lists(*lists), softmax=Softmax(0.125), out=out,
        workspace=workspace, impl="triton",
    )  # fmt: skip
    exact = naive_attention(batch, lists, torch.float64)
    eager = naive_attention(batch, lists, batch.dtype)
    assert_within_budget(out, exact, eager, rounding(batch.dtype))
    if splits > 1:
        with pytest.raises(ValueError, match="workspace holds"):
            gathered_decode_attention(
                batch.q, batch.kv, batch.plan, batch.lists(*lists), softmax=Softmax(0.125),
                out=out, workspace=workspace[1:], impl="triton",
            )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_neighbours_do_not_change_a_row(impl: str) -> None:
    batch = make_batch(([257, 111, 300], 64, 2, 4, 64, torch.bfloat16, 1, 1), dense_rows=())
    lists = batch.random_lists()
    before = attend(batch, lists, impl)
    swapped = replace(batch.plan, seq_lens=batch.plan.seq_lens.clone())
    swapped.seq_lens[1] = 105
    swapped.tail_start[1] = 104
    batch.plan = swapped
    after = attend(batch, lists, impl)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("head_map", [[2, 0, 2], [0, 0, 0]])
def test_a_head_attends_to_the_list_that_it_is_mapped_to(impl: str, head_map: list[int]) -> None:
    batch = make_batch(([257, 111, 300], 64, 3, 4, 64, torch.bfloat16, 1, 1), dense_rows=())
    indices, counts = batch.random_lists()
    taken = torch.tensor(head_map, dtype=torch.int32, device=DEVICE)
    # A layer may have fewer lists than heads.
    lists = (
        indices[:, : max(head_map) + 1].contiguous(),
        counts[:, : max(head_map) + 1].contiguous(),
    )
    out = torch.full_like(batch.q, NAN)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, batch.lists(*lists, taken), softmax=batch.softmax(),
        out=out, impl=impl,
        workspace=make_workspace(3, 12, 3, 64, DEVICE).fill_(NAN),
    )  # fmt: skip
    mapped = indices[:, head_map], counts[:, head_map]
    exact = naive_attention(batch, mapped, torch.float64)
    eager = naive_attention(batch, mapped, batch.dtype)
    assert_within_budget(out, exact, eager, rounding(batch.dtype))
    unmapped = naive_attention(batch, (indices, counts), torch.float64)
    assert (unmapped - exact).abs().max() > 0.1


@pytest.mark.parametrize(
    ("rows", "capacity", "splits"), [(1, 4096, 2), (3, 4096, 2), (9, 4096, 1), (3, 4095, 1)]
)
def test_long_lists_take_several_rounds_of_programs(rows: int, capacity: int, splits: int) -> None:
    from sglang_sparse_kernels.attend.types import num_splits

    # Two programs fill the interpreter's device, six are three rounds of them.
    device = torch.device("cpu")
    assert num_splits(rows, 1, capacity, device) == splits
    floats = make_workspace(rows, 2, 1, 64, device).numel()
    assert floats >= rows * splits * 2 * (64 + 1)


# lengths with the drafts, page size, heads, group, dim, dtype, unit, cadence; queries a row
DRAFTED = [
    (([257, 63, 111, 30], 64, 2, 1, 64, torch.bfloat16, 1, 1), 3),
    (([130, 511], 32, 1, 2, 128, torch.float16, 1, 1), 8),
    (([300, 66], 16, 1, 3, 64, torch.bfloat16, 16, 1), 5),
    (([111, 50, 257], 64, 2, 4, 128, torch.bfloat16, 16, 1), 16),
    (([700, 20], 32, 1, 8, 64, torch.float16, 1, 3), 4),
]


def drafted_batch(case: tuple, queries: int, dtype: torch.dtype | None = None) -> Batch:
    """A batch whose plan is of each row's first query; the drafts are its last tokens."""
    batch = make_batch(case)
    batch.fill_plan(batch.plan, batch.seq_lens - (queries - 1), "torch")
    tokens = TokenTable(batch.req_to_token, batch.req_slots, batch.seq_lens)
    snapshot_page_table(tokens, page_size=batch.page_size, out=batch.plan.page_table, impl="torch")
    # Rows of q lie apart, as they do in a fused qkv projection.
    heads = batch.heads * batch.group
    fused = batch.randn(len(batch.lengths) * queries, heads + 3, batch.dim)
    batch.q = fused.to(DEVICE, batch.dtype)[:, :heads]
    if dtype is not None:
        batch.q = batch.q.to(dtype)
        batch.k, batch.v = [k.to(dtype) for k in batch.k], [v.to(dtype) for v in batch.v]
    return batch


def one_by_one(batch: Batch, lists: tuple, queries: int, dtype: torch.dtype) -> torch.Tensor:
    """Each query alone, as the last token of a row that ends with it."""
    together, lengths, plan = batch.q, batch.lengths, batch.plan
    parts = []
    for j in range(queries):
        batch.q = together[j::queries]
        batch.lengths = [length - (queries - 1) + j for length in lengths]
        parts.append(naive_attention(batch, lists, dtype))
    batch.q, batch.lengths, batch.plan = together, lengths, plan
    return torch.stack(parts, 1).flatten(0, 1)


def attend_drafts(
    batch: Batch, lists: tuple, queries: int, impl: str, floats: int | None = None
) -> torch.Tensor:
    out = torch.full(batch.q.shape, NAN, dtype=batch.q.dtype, device=DEVICE)
    workspace = make_workspace(
        len(batch.lengths), batch.heads * batch.group, batch.heads, batch.dim, DEVICE,
        queries=queries,
    ).fill_(NAN)  # fmt: skip
    if floats is not None:
        workspace = torch.full((floats,), NAN, device=DEVICE)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, batch.lists(*lists), softmax=batch.softmax(), out=out,
        workspace=workspace, queries=queries, impl=impl,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize(("case", "queries"), DRAFTED)
def test_drafts_share_the_list_of_their_row_and_are_causal_among_themselves(
    case: tuple, queries: int, impl: str
) -> None:
    batch = drafted_batch(case, queries, torch.float64)
    lists = batch.random_lists()
    want = one_by_one(batch, lists, queries, torch.float64)
    torch.testing.assert_close(attend_drafts(batch, lists, queries, impl), want)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("case", "queries"), DRAFTED)
def test_the_kernel_verifies_drafts_within_the_error_budget(
    case: tuple, queries: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sparse_kernels.attend import kernel

    # Splits that hold drafts alone: nothing in them is for the first query.
    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    batch = drafted_batch(case, queries)
    lists = batch.random_lists()
    exact = one_by_one(batch, lists, queries, torch.float64)
    eager = one_by_one(batch, lists, queries, batch.dtype)
    floats = batch.q.shape[0] * batch.q.shape[1] * splits * (batch.dim + 1)
    got = attend_drafts(batch, lists, queries, "triton", floats)
    for row in range(len(got)):
        assert_within_budget(got[row], exact[row], eager[row], rounding(batch.dtype))


def test_more_queries_than_a_program_holds_are_refused() -> None:
    case = ([111], 64, 1, 8, 64, torch.bfloat16, 1, 1)
    batch = drafted_batch(case, 9)
    with pytest.raises(ValueError, match="9 queries of 8 heads a KV head must be 64 or fewer"):
        attend_drafts(batch, batch.random_lists(), 9, "triton")
