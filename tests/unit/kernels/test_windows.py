# SPDX-License-Identifier: Apache-2.0
"""Streaming heads beside heads that select: attention over windows, with lists and until a stop."""

from dataclasses import replace

import pytest
import torch
from error_budget import assert_within_budget
from kernel_cases import DEVICE, FAR, IMPLS, NAN, Batch, random_kinds
from progressive_cases import Setting, in_double, run, shape_keys
from progressive_cases import make_batch as progressive_batch
from test_attend import CASES, make_batch, rounding

from sglang_sparse_kernels import (
    COUNTERS,
    HeadWindows,
    gathered_decode_attention,
    make_workspace,
)
from sglang_sparse_kernels.attend import kernel as attend_kernel
from sglang_sparse_kernels.progressive import kernel as progressive_kernel

STALE = -77
# sink, local: shorter than every row, longer than some, longer than all, without sinks, one token.
WINDOWS = [(16, 48), (64, 128), (512, 1024), (0, 33), (7, 1)]


def words(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def naive_attention(
    batch: Batch, lists: tuple, windows: HeadWindows, dtype: torch.dtype
) -> torch.Tensor:
    """Softmax over the visible positions, one row and head at a time, in ``dtype``."""
    indices, counts = lists
    plan, size, out = batch.plan, batch.page_size, torch.zeros_like(batch.q, dtype=dtype)
    for row, length in enumerate(batch.lengths):
        tail, target = int(plan.tail_start[row]), int(plan.request_slots[row])
        for head in range(batch.heads):
            if tail > 0 and windows.streams[head]:
                first = max(0, length - windows.local)
                seen = [p for p in range(length) if p < windows.sink or p >= first]
            else:
                seen = list(range(tail, length))
                for unit in indices[target, head, : int(counts[target, head])].tolist():
                    begin = unit * batch.unit
                    seen += range(begin, min(begin + batch.unit, tail)) if tail else ()
            at = torch.tensor(seen, device=DEVICE)
            slots = plan.page_table[row].long()[at // size] * size + at % size
            mine = slice(head * batch.group, (head + 1) * batch.group)
            logits = batch.q[row, mine].to(dtype) @ batch.k[0][slots, head].to(dtype).T
            weights = (logits * batch.dim**-0.5).softmax(-1)
            out[row, mine] = weights @ batch.v[0][slots, head].to(dtype)
    return out


def attend(batch: Batch, lists: tuple, windows: HeadWindows | None, impl: str) -> torch.Tensor:
    out = torch.full_like(batch.q, NAN)
    workspace = make_workspace(
        len(batch.lengths), batch.heads * batch.group, batch.heads, batch.dim, DEVICE
    ).fill_(NAN)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, replace(batch.lists(*lists), windows=windows),
        softmax=batch.softmax(), out=out, workspace=workspace, impl=impl,
    )  # fmt: skip
    return out


def poisoned_lists(batch: Batch, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random lists; those of streaming heads hold what nobody may read."""
    indices, counts = batch.random_lists()
    indices[:, kinds != 0] = FAR
    counts[:, kinds != 0] = 2**20
    return indices, counts


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", WINDOWS[:3])
def test_heads_of_both_kinds_attend_to_what_is_theirs(
    impl: str, case: tuple, window: tuple[int, int]
) -> None:
    batch = make_batch(case)
    windows = HeadWindows(random_kinds(batch), *window)
    lists = poisoned_lists(batch, windows.streams)
    exact = naive_attention(batch, lists, windows, torch.float64)
    eager = naive_attention(batch, lists, windows, batch.dtype)
    got = attend(batch, lists, windows, impl)
    for row in range(len(batch.lengths)):
        assert_within_budget(got[row], exact[row], eager[row], rounding(batch.dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", WINDOWS)
def test_all_heads_streaming_are_a_sliding_window_with_sinks(
    impl: str, window: tuple[int, int]
) -> None:
    batch = make_batch(([257, 1, 111, 700, 63], 64, 2, 4, 64, torch.bfloat16, 16, 3))
    sink, local = window
    windows = HeadWindows(words([1, 1]), sink, local)
    got = attend(batch, poisoned_lists(batch, windows.streams), windows, impl)
    for row, length in enumerate(batch.lengths):
        position = torch.arange(length, device=DEVICE)
        masked = (position >= sink) & (position < length - local)
        masked &= bool(batch.plan.tail_start[row] > 0)
        slots = batch.kv.slots(row, position)

        def masked_attention(
            dtype: torch.dtype, row: int = row, slots: torch.Tensor = slots,
            masked: torch.Tensor = masked,
        ) -> torch.Tensor:  # fmt: skip
            query = batch.q[row].to(dtype).view(batch.heads, batch.group, -1)
            keys, values = batch.k[0][slots].to(dtype), batch.v[0][slots].to(dtype)
            logits = torch.einsum("hgd,nhd->hgn", query, keys) * batch.dim**-0.5
            weights = logits.masked_fill(masked, float("-inf")).softmax(-1)
            return torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)

        exact, eager = masked_attention(torch.float64), masked_attention(batch.dtype)
        assert_within_budget(got[row], exact, eager, rounding(batch.dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_without_a_streaming_head_no_bit_changes(impl: str) -> None:
    batch = make_batch(([257, 111, 300], 64, 2, 4, 64, torch.bfloat16, 16, 1), dense_rows=())
    lists = batch.random_lists()
    none = HeadWindows(words([0, 0]), 16, 48)
    assert torch.equal(attend(batch, lists, none, impl), attend(batch, lists, None, impl))


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits_gives_the_same_windows(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_kernel, "num_splits", lambda *_: splits)
    batch = make_batch(([511, 1, 70], 64, 3, 2, 64, torch.bfloat16, 1, 1))
    windows = HeadWindows(words([1, 0, 1]), 32, 64)
    lists = poisoned_lists(batch, windows.streams)
    out = torch.full_like(batch.q, NAN)
    gathered_decode_attention(
        batch.q, batch.kv, batch.plan, replace(batch.lists(*lists), windows=windows),
        softmax=batch.softmax(), out=out, impl="triton",
        workspace=torch.full((3 * 6 * splits * 65,), NAN, device=DEVICE),
    )  # fmt: skip
    exact = naive_attention(batch, lists, windows, torch.float64)
    eager = naive_attention(batch, lists, windows, batch.dtype)
    assert_within_budget(out, exact, eager, rounding(batch.dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [(16, 48), (0, 1), (96, 200), (16, 512)])
def test_each_query_of_a_row_has_a_window_of_its_own(impl: str, window: tuple[int, int]) -> None:
    """Three consecutive tokens share the lists; the window of each ends with it."""
    queries, lengths = 3, [257, 130, 45]
    whole = Batch([n + queries - 1 for n in lengths], heads=2, group=2, page_size=64, seed=3)
    whole.fill_plan(whole.plan, torch.tensor(lengths, device=DEVICE), "torch")
    windows = HeadWindows(words([0, 1]), *window)
    lists = poisoned_lists(whole, windows.streams)
    q = whole.randn(len(lengths) * queries, 4, 64).to(DEVICE, whole.dtype)
    out = torch.full_like(q, NAN)
    gathered_decode_attention(
        q, whole.kv, whole.plan, replace(whole.lists(*lists), windows=windows),
        softmax=whole.softmax(), out=out, queries=queries, impl=impl,
        workspace=make_workspace(3, 4, 2, 64, DEVICE, queries=queries).fill_(NAN),
    )  # fmt: skip
    for j in range(queries):
        # The plan is the first query's, and so is what precedes the tail.
        one = Batch([n + queries - 1 for n in lengths], heads=2, group=2, page_size=64, seed=3)
        one.fill_plan(one.plan, torch.tensor(lengths, device=DEVICE), "torch")
        one.q, one.lengths = q[j::queries], [n + j for n in lengths]
        exact = naive_attention(one, lists, windows, torch.float64)
        eager = naive_attention(one, lists, windows, one.dtype)
        for row in range(len(lengths)):
            got = out[row * queries + j]
            assert_within_budget(got, exact[row], eager[row], rounding(one.dtype))


def test_a_window_of_another_layer_is_refused() -> None:
    batch = make_batch(([257, 111], 64, 2, 1, 64, torch.bfloat16, 1, 1))
    for windows, words_of in (
        (HeadWindows(words([1]), 16, 48), "streams has shape"),
        (HeadWindows(words([1, 0]).long(), 16, 48), "streams is torch.int64"),
    ):
        with pytest.raises(ValueError, match=words_of):
            attend(batch, batch.random_lists(), windows, "torch")
    with pytest.raises(ValueError, match="local=-1"):
        HeadWindows(words([1]), 16, -1)


# Until a share of the mass is reached.


@pytest.fixture
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few chunks before the first stop check, so that windows hold several tiles each."""
    monkeypatch.setattr(progressive_kernel, "MAX_PROLOGUE_CHUNKS", 3)


MASS_CASES = [
    ([300, 1, 130, 30], 64, 3, 2, 64, torch.bfloat16, 16, 1, 32, 64),
    ([311, 157], 16, 2, 1, 64, torch.bfloat16, 16, 3, 64, 64),
    ([170, 90], 32, 2, 3, 64, torch.float16, 1, 1, 16, 96),
]


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("case", "upper"),  # bounds are of pages
    [(case, False) for case in MASS_CASES] + [(case, True) for case in MASS_CASES if case[6] > 1],
)
def test_streaming_heads_are_complete_before_the_first_stop_check(
    impl: str, case: tuple, upper: bool
) -> None:
    """What lists reach is what they reach without windows, and windows are what they are alone."""
    ask = Setting(0.8, case[8], upper=upper)
    batch, other = progressive_batch(case), progressive_batch(case)
    if impl == "torch":
        batch, other = in_double(batch), in_double(other)
    scores, same = shape_keys(batch, "peaked"), shape_keys(other, "peaked")
    torch.testing.assert_close(scores, same, equal_nan=True, rtol=0, atol=0)
    windows = HeadWindows(random_kinds(batch), 32, 64)
    streams = windows.streams != 0
    got = run(batch, scores, ask, impl, windows=windows)
    want = run(other, scores, ask, impl)
    sparse = batch.plan.k_units > 0
    rows = batch.plan.request_slots[sparse].long()
    assert (got["reached"][rows][:, streams] == 0).all()
    assert torch.equal(got["reached"][rows][:, ~streams], want["reached"][rows][:, ~streams])
    assert (want["reached"][rows] > 0).all()
    pairs, blocks = (got["counters"][COUNTERS.index(name)] for name in ("pairs", "blocks"))
    assert int(pairs) == len(rows) * int((~streams).sum())
    assert int(blocks) == int(want["reached"][rows][:, ~streams].sum())
    group = streams.repeat_interleave(batch.group)
    if impl == "triton":
        # A head's result depends on nothing of another head.
        assert torch.equal(got["out"][:, ~group], want["out"][:, ~group])
    lists = got["indices"], got["reached"].clone()
    exact = naive_attention(batch, lists, windows, torch.float64)
    if impl == "torch":
        torch.testing.assert_close(got["out"], exact)
        return
    eager = naive_attention(batch, lists, windows, batch.dtype)
    for row in range(len(batch.lengths)):
        assert_within_budget(got["out"][row], exact[row], eager[row], rounding(batch.dtype))


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_stop_is_found_for_lists_that_are_read_alone(impl: str) -> None:
    """A layer that selects for later ones: an empty window stands for a list that nobody reads."""
    case = MASS_CASES[0]
    batch, other = progressive_batch(case), progressive_batch(case)
    if impl == "torch":
        batch, other = in_double(batch), in_double(other)
    scores, _ = shape_keys(batch, "peaked"), shape_keys(other, "peaked")
    ask = Setting(0.8, case[8], output=False)
    unread = HeadWindows(words([0, 1, 0]), 0, 0)
    got, want = run(batch, scores, ask, impl, windows=unread), run(other, scores, ask, impl)
    rows = batch.plan.request_slots[batch.plan.k_units > 0].long()
    assert torch.equal(got["reached"][rows][:, [0, 2]], want["reached"][rows][:, [0, 2]])
    assert (got["reached"][rows][:, 1] == 0).all()
    assert int(got["counters"][0]) == 2 * len(rows)


def test_visible_positions_are_those_of_the_definition() -> None:
    windows = HeadWindows(words([1]), 3, 5)
    assert windows.positions(2).tolist() == [0, 1]
    assert windows.positions(7).tolist() == list(range(7))
    assert windows.positions(11).tolist() == [0, 1, 2, 6, 7, 8, 9, 10]
    assert replace(windows, sink=0, local=0).positions(3).tolist() == []
