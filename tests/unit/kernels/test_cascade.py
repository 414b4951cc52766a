# SPDX-License-Identifier: Apache-2.0
"""Cascading KV cache: the definition against the paper's algorithms, kernels against float64."""

from itertools import pairwise

import pytest
import torch
from cascade_cases import Request, batch_of, empty_state, positions_held, rotation_table
from error_budget import UNIT_ROUNDOFF, assert_within_budget
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, NAN

from sglang_sparse_kernels import Softmax
from sglang_sparse_kernels.cascade import (
    AttentionAverage,
    CascadeShape,
    append_tokens,
    cascade_attention,
    close_strides,
    make_cascade_workspace,
    state_bytes,
)
from sglang_sparse_kernels.cascade.reference import kept_rows
from sglang_sparse_kernels.cascade.sequential import (
    SequentialCascade,
    Token,
    sequential_attention,
)

AVERAGE = AttentionAverage(0.97)


@st.composite
def shapes(draw: st.DrawFn) -> CascadeShape:
    """Small shapes with every relation of level, stride and window."""
    levels = draw(st.integers(1, 4))
    stride = (1 << (levels - 1)) * draw(st.integers(1, 3))
    window = stride * levels * draw(st.integers(1, 3)) // draw(st.sampled_from([1, levels]))
    if window % levels:
        window = stride * levels
    return CascadeShape(window, draw(st.integers(0, 5)), levels, stride)


# A stride of one token; levels smaller than what they gain; one level, which is a sink cache; eight
# levels and strides of a whole window, as the reference model's preset has.
SHAPES = [
    CascadeShape(24, 3, 4, 8),
    CascadeShape(6, 2, 1, 3),
    CascadeShape(16, 0, 4, 16),
    CascadeShape(5, 1, 1, 1),
    CascadeShape(32, 4, 2, 4),
    CascadeShape(128, 3, 8, 128),
]


@settings(max_examples=150, deadline=None)
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_kept_rows_are_what_the_paper_keeps_one_token_at_a_time(
    shape: CascadeShape, seed: int, distinct: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache, none = SequentialCascade(shape), torch.zeros(0)
    tokens = [Token(i, none, none) for i in range(shape.full)]
    for token in tokens:
        cache.insert(token)
    for _ in range(4):
        first = cache.seen
        # Few distinct scores, hence many ties; they change between strides.
        new = [Token(first + i, none, none) for i in range(shape.stride)]
        held = [*cache.tokens(), *new]
        scores = torch.randint(distinct, (len(held),), generator=generator).double()
        for token, score in zip(held, scores.tolist(), strict=True):
            token.score = score
        kept = kept_rows(scores[shape.sinks :], shape) + shape.sinks
        for token in new:
            cache.insert(token)
        want = [token.position for token in cache.tokens()]
        assert [token.position for token in held[: shape.sinks]] + [
            held[i].position for i in kept.tolist()
        ] == want


def test_without_scores_each_level_keeps_every_second_token_of_the_one_before() -> None:
    shape = CascadeShape(32, 0, 4, 8)
    cache, none = SequentialCascade(shape), torch.zeros(0)
    for i in range(400):
        cache.insert(Token(i, none, none, score=-i))
    for level, tokens in enumerate(cache.levels):
        gaps = {b.position - a.position for a, b in pairwise(tokens)}
        assert gaps == {2**level}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_the_definition_is_the_papers_algorithm(shape: CascadeShape, reduce: str) -> None:
    average = AttentionAverage(0.9, reduce)
    tokens = shape.rows + 3 * shape.stride + 2
    request = Request(tokens, 2, 2, 64, torch.float64, seed=shape.window)
    table = rotation_table(shape.rows, 64).cpu()
    want, held = sequential_attention(
        request.q.cpu(), request.k.cpu(), request.v.cpu(), shape, table,
        softmax=request.softmax, average=average,
    )  # fmt: skip
    state = empty_state(shape, slots=2, heads=2, dim=64, dtype=torch.float64)
    got = request.run(state, 1, [tokens], average=average, impl="torch")
    torch.testing.assert_close(got.cpu(), want)
    assert positions_held(state, 1, request) == [[x.position for x in head] for head in held]
    scores = torch.tensor([[x.score for x in head] for head in held], dtype=torch.float64)
    torch.testing.assert_close(state.scores[0, 1, :, : scores.shape[1]].cpu(), scores)
    assert state.k[0, 0].isnan().all()


@settings(max_examples=25, deadline=None)
@given(shapes(), st.data())
def test_what_is_held_does_not_depend_on_how_tokens_arrived(
    shape: CascadeShape, data: st.DataObject
) -> None:
    tokens = shape.rows + data.draw(st.integers(1, 2 * shape.stride))
    request = Request(tokens, 1, 2, 64, torch.float64, seed=tokens)
    cuts = data.draw(st.sets(st.integers(1, tokens - 1)).map(sorted))
    states = [empty_state(shape, slots=1, heads=1, dim=64, dtype=torch.float64) for _ in range(2)]
    whole = request.run(states[0], 0, [tokens], average=AVERAGE, impl="torch")
    parts = request.run(states[1], 0, [*cuts, tokens], average=AVERAGE, impl="torch")
    torch.testing.assert_close(parts, whole)
    held = [positions_held(state, 0, request) for state in states]
    assert held[0] == held[1]
    rows = shape.held(tokens)
    torch.testing.assert_close(states[1].scores[..., :rows], states[0].scores[..., :rows])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_up_to_the_window_and_a_stride_the_output_is_dense_attentions(impl: str) -> None:
    shape, dtype = CascadeShape(64, 5, 4, 16), torch.bfloat16
    request = Request(shape.rows, 2, 4, 64, dtype, seed=1)
    table = rotation_table(shape.rows, 64)

    def dense(dtype: torch.dtype) -> torch.Tensor:
        cos, sin = table.to(dtype)[:, None].chunk(2, -1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            low, high = x.to(dtype).chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        q, k = turned(request.q), turned(request.k).repeat_interleave(4, 1)
        v = request.v.to(dtype).repeat_interleave(4, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * 64**-0.5
        later = torch.ones(shape.rows, shape.rows, dtype=torch.bool, device=DEVICE).triu(1)
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(later, -torch.inf).softmax(-1), v)

    state = empty_state(shape, slots=1, heads=2, dim=64, dtype=dtype)
    got = request.run(state, 0, [40, 41, 42, shape.rows], average=AVERAGE, impl=impl)
    assert_within_budget(got, dense(torch.float64), dense(dtype), 3 * UNIT_ROUNDOFF[dtype])
    assert positions_held(state, 0, request) == [list(range(shape.rows))] * 2


@pytest.mark.parametrize("shape", [*SHAPES, CascadeShape(256, 1, 2, 128)])
def test_kernels_evict_as_the_definition_does(shape: CascadeShape) -> None:
    assert_kernels_evict_alike(shape, distinct=3, seed=shape.window)


# Every shape compiles kernels of its own on a GPU.
@settings(max_examples=3 if torch.cuda.is_available() else 12, deadline=None)
@given(shapes(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_kernels_evict_alike_whatever_the_shape(
    shape: CascadeShape, distinct: int, seed: int
) -> None:
    assert_kernels_evict_alike(shape, distinct=distinct, seed=seed)


def assert_kernels_evict_alike(shape: CascadeShape, *, distinct: int, seed: int) -> None:
    """Compare keys, values and scores; few distinct scores make many ties."""
    torch.manual_seed(seed)
    layers, heads, dim = 2, 3, 64
    state = empty_state(shape, layers=layers, slots=4, heads=heads, dim=dim, dtype=torch.bfloat16)
    state.k.copy_(torch.randn_like(state.k, dtype=torch.float32))
    state.v.copy_(torch.randn_like(state.v, dtype=torch.float32))
    state.scores.copy_(torch.randint(distinct, state.scores.shape, device=DEVICE))
    other = empty_state(shape, layers=layers, slots=4, heads=heads, dim=dim, dtype=torch.bfloat16)
    for mine, theirs in zip(vars(state).values(), vars(other).values(), strict=True):
        if isinstance(mine, torch.Tensor):
            theirs.copy_(mine)
    slots = torch.tensor([2, -1, 0, 3], dtype=torch.int32, device=DEVICE)
    # Full; padding; one token short; several strides later.
    tokens = torch.tensor([0, 0, -1, 3 * shape.stride], device=DEVICE) + shape.rows
    tokens = tokens.int()
    workspace = make_cascade_workspace(state, max_rows=1, num_heads=heads, close_rows=3)
    workspace.winners.fill_(-1)
    close_strides(state, slots, tokens, impl="torch")
    before = other.k.clone()
    close_strides(other, slots, tokens, workspace=workspace, impl="triton")
    assert torch.equal(other.k[:, :2], before[:, :2])
    assert not torch.equal(other.k[:, 2:], before[:, 2:])
    window = slice(0, shape.full)
    for mine, theirs in ((state.k, other.k), (state.v, other.v), (state.scores, other.scores)):
        assert torch.equal(theirs[:, :, :, window], mine[:, :, :, window])


# heads, group, dim, dtype, logit cap
MODELS = [
    (2, 4, 64, torch.bfloat16, 0.0),
    (1, 1, 128, torch.float16, 0.0),
    (1, 3, 64, torch.bfloat16, 4.0),
    (1, 16, 64, torch.bfloat16, 0.0),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("new", [[1, 1, 1], [17, 1, 70], [5, 90, 33]])
def test_kernels_are_within_the_error_budget_of_float64(
    model: tuple, reduce: str, new: list[int]
) -> None:
    heads, group, dim, dtype, cap = model
    shape, average = CascadeShape(192, 3, 2, 96), AttentionAverage(0.99, reduce)
    lengths, slots = [new[0], shape.rows + 5 * shape.stride - 2, 111], [3, 1, 0]
    table, softmax = rotation_table(shape.rows + 7, dim), Softmax(dim**-0.5, cap)
    batch = batch_of(slots, lengths, new)
    fresh = Request(sum(new), heads, group, dim, dtype, seed=sum(new) + dim)
    old = Request(shape.rows, heads, 1, dim, dtype, seed=9)
    old_scores = torch.rand(heads, shape.rows, device=DEVICE)

    def run(impl: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        state = empty_state(shape, slots=4, heads=heads, dim=dim, dtype=dtype)
        request = fresh.double() if dtype == torch.float64 else fresh
        for slot, length, added in zip(slots, lengths, new, strict=True):
            held = shape.held(length) - added
            state.k[0, slot, :, :held] = old.k[:held].transpose(0, 1).to(dtype)
            state.v[0, slot, :, :held] = old.v[:held].transpose(0, 1).to(dtype)
            state.scores[0, slot, :, :held] = old_scores[:, :held].to(state.scores.dtype)
        append_tokens(request.k, request.v, state, batch, impl=impl)
        out = torch.full_like(request.q, NAN)
        workspace = make_cascade_workspace(state, max_rows=3, num_heads=heads * group)
        workspace.attention.fill_(NAN)
        workspace.logits.fill_(NAN)
        cascade_attention(
            request.q, state, batch, table, softmax=softmax, average=average, out=out,
            workspace=workspace, impl=impl,
        )  # fmt: skip
        assert state.k[0, 2].isnan().all()
        scores = [
            state.scores[0, slot, :, : shape.held(length)].flatten()
            for slot, length in zip(slots, lengths, strict=True)
        ]
        for slot, length in zip(slots, lengths, strict=True):
            assert state.scores[0, slot, :, shape.held(length) :].isnan().all()
        return out, torch.cat(scores)

    exact, eager, got = run("torch", torch.float64), run("torch", dtype), run("triton", dtype)
    # A probability meets V rounded, at a running maximum, and the output is rounded.
    assert_within_budget(got[0], exact[0], eager[0], 3 * UNIT_ROUNDOFF[dtype])
    # A rotated channel between two numbers may round the other way.
    assert_within_budget(got[1], exact[1], eager[1], UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("new", [1, 6])
def test_padding_stores_nothing_and_its_output_is_zero(impl: str, new: int) -> None:
    shape = CascadeShape(32, 2, 2, 16)
    request = Request(2 * new, 2, 2, 64, torch.bfloat16, seed=4)
    state = empty_state(shape, slots=1, heads=2, dim=64, dtype=torch.bfloat16)
    batch = batch_of([-1, 0], [new, new], [new, new])
    append_tokens(request.k, request.v, state, batch, impl=impl)
    out = torch.full_like(request.q, NAN)
    workspace = make_cascade_workspace(state, max_rows=2, num_heads=4)
    cascade_attention(
        request.q, state, batch, rotation_table(shape.rows, 64), softmax=request.softmax,
        average=AVERAGE, out=out, workspace=workspace, impl=impl,
    )  # fmt: skip
    assert (out[:new] == 0).all()
    assert not out.isnan().any()
    assert torch.equal(state.k[0, 0, :, :new], request.k[new:].transpose(0, 1))
    assert state.k[0, 0, :, new:].isnan().all()


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits_gives_the_same_step(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sparse_kernels.cascade import decode_kernel

    shape, dtype = CascadeShape(192, 3, 2, 96), torch.bfloat16
    monkeypatch.setattr(decode_kernel, "num_splits", lambda *_: splits)
    monkeypatch.setattr(
        "sglang_sparse_kernels.cascade.types.make_workspace",
        lambda rows, heads, kv, dim, device: torch.full(
            (rows * heads * splits * (dim + 1),), NAN, device=device
        ),
    )
    request = Request(shape.rows + 40, 1, 4, 64, dtype, seed=splits)
    tokens = request.tokens
    runs = []
    for impl, source in (("torch", request.double()), ("torch", request), ("triton", request)):
        state = empty_state(shape, slots=1, heads=1, dim=64, dtype=source.q.dtype)
        cuts = [tokens - 3, tokens - 2, tokens - 1, tokens]
        runs.append(source.run(state, 0, cuts, average=AVERAGE, impl=impl)[-3:])
    exact, eager, got = runs
    assert_within_budget(got, exact, eager, 3 * UNIT_ROUNDOFF[dtype])


def test_kernels_hold_what_the_definition_holds_over_many_strides() -> None:
    shape, average = CascadeShape(64, 4, 4, 32), AttentionAverage(0.999)
    request = Request(shape.rows + 4 * shape.stride + 7, 2, 2, 64, torch.bfloat16, seed=2)
    cuts = [90, request.tokens - 5, *range(request.tokens - 4, request.tokens + 1)]
    held = []
    for impl in ("torch", "triton"):
        state = empty_state(shape, slots=1, heads=2, dim=64, dtype=torch.bfloat16)
        request.run(state, 0, cuts, average=average, impl=impl)
        held.append(positions_held(state, 0, request))
    for mine, theirs in zip(*held, strict=True):
        # Scores that agree but for rounding may order a pair the other way.
        assert len(set(mine) & set(theirs)) >= 0.97 * len(mine)


@pytest.mark.parametrize("seed", [12, 13, 14])
def test_schedules_of_the_same_request_hold_the_same_tokens(seed: int) -> None:
    # A GPU takes sizes at which scores are nearly equal somewhere.
    small = DEVICE.type == "cpu"
    shape = CascadeShape(64, 4, 4, 32) if small else CascadeShape(4096, 64, 4, 1024)
    request = Request(shape.rows + 3 * shape.stride + 7, 2, 2, 64, torch.bfloat16, seed=seed)
    close = shape.rows + shape.stride
    # A stride is wholly decoded, and both of its ends are.
    steps = [*range(close - 3, close + shape.stride + 4)]
    middle = close + shape.stride + shape.stride // 2
    schedules = [[request.tokens], [50, *steps, middle, request.tokens]]
    held = []
    for cuts in schedules:
        state = empty_state(shape, slots=1, heads=2, dim=64, dtype=torch.bfloat16)
        request.run(state, 0, cuts, average=AttentionAverage(0.9999), impl="triton")
        held.append(positions_held(state, 0, request))
    for one, other in zip(*held, strict=True):
        assert len(set(one) & set(other)) >= 0.999 * len(one)


def test_the_shape_says_what_is_held() -> None:
    shape = CascadeShape(12, 2, 3, 4)
    assert [shape.held(t) for t in (1, 14, 18, 19, 22, 23)] == [1, 14, 18, 15, 18, 15]
    assert [t for t in range(40) if shape.closes(t)] == [18, 22, 26, 30, 34, 38]
    assert shape.cut(0, 27) == [(0, 18), (18, 22), (22, 26), (26, 27)]
    assert shape.cut(20, 22) == [(20, 22)]
    state = empty_state(shape, layers=3, slots=2, heads=2, dim=64, dtype=torch.bfloat16)
    one = state_bytes(shape, layers=3, kv_heads=2, dim=64, dtype=torch.bfloat16)
    assert state.nbytes == 2 * one


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 0, 1, 4), "does not divide window"),
        ((12, 0, 5, 4), "levels=5 does not divide"),
        ((12, 0, 3, 6), "no multiple of"),
        ((0, 0, 1, 1), "positive"),
    ],
)
def test_shapes_that_cannot_be_are_refused(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CascadeShape(*sizes)


def test_wrong_arguments_are_refused() -> None:
    shape = CascadeShape(32, 2, 2, 16)
    request = Request(3, 2, 2, 64, torch.bfloat16, seed=0)
    state = empty_state(shape, slots=1, heads=2, dim=64, dtype=torch.bfloat16)
    batch = batch_of([0], [3], [3])
    with pytest.raises(ValueError, match="beta"):
        AttentionAverage(1.0)
    with pytest.raises(ValueError, match="reduce"):
        AttentionAverage(0.5, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="impl"):
        append_tokens(request.k, request.v, state, batch, impl="cuda")  # type: ignore[arg-type]
    both = empty_state(shape, layers=2, slots=1, heads=2, dim=64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k of a layer"):
        append_tokens(request.k, request.v, both, batch, impl="torch")
    with pytest.raises(ValueError, match="positions"):
        cascade_attention(
            request.q, state, batch, rotation_table(49, 64), softmax=request.softmax,
            average=AVERAGE, out=request.q.clone(), impl="torch",
        )  # fmt: skip
    with pytest.raises(ValueError, match="workspace"):
        close_strides(state, batch.slots, batch.seq_lens, impl="triton")
