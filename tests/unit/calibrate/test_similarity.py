# SPDX-License-Identifier: Apache-2.0
"""Similarity in blocks beside a direct computation over whole attention matrices."""

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, dot_rounding

from sglang_sparse.calibrate.similarity import LayerQK, prompt_similarity

LAYERS, HEADS, GROUP, TOKENS, DIM = 4, 2, 3, 61, 16


def random_layers(seed: int) -> list[LayerQK]:
    rng = torch.Generator().manual_seed(seed)
    return [
        LayerQK(
            3 * torch.randn(HEADS * GROUP, TOKENS, DIM, generator=rng),
            torch.randn(HEADS, TOKENS, DIM, generator=rng),
            DIM**-0.5,
        )
        for _ in range(LAYERS)
    ]


def whole_attention(layer: LayerQK) -> torch.Tensor:
    """[H, N, N] in float64."""
    keys = layer.k.double().repeat_interleave(GROUP, 0)
    logits = layer.q.double() @ keys.transpose(1, 2) * layer.scaling
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    p = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return p.view(HEADS, GROUP, TOKENS, TOKENS).mean(1)


def direct(source: torch.Tensor, target: torch.Tensor, top_k: int) -> tuple[float, float]:
    """(least, mean) share over queries, one query at a time; both are [N, N]."""
    shares = []
    for query in range(TOKENS):
        p, q = source[query, : query + 1], target[query, : query + 1]
        chosen = p.argsort(descending=True)[:top_k]
        best = q.sort(descending=True).values[:top_k].sum()
        shares.append(float(q[chosen].sum() / best))
    return min(shares), sum(shares) / TOKENS


def share_error(layers: list[LayerQK], top_k: int) -> float:
    """Bound of the rounding of a share in float32.

    The relative error of a probability is twice that of a logit, for the sum of the softmax has it,
    too, and a roundoff for exp, the division and each term of a sum over tokens, heads and groups.
    The two sums of a share have the same error, and a roundoff each for their terms and the ratio.
    """
    logit = max(
        float(dot_rounding(x.q.norm(dim=-1).max() * x.k.norm(dim=-1).max() * x.scaling, DIM))
        for x in layers
    )
    terms = TOKENS + 2 + GROUP + HEADS
    return 2 * (2 * logit + (terms + top_k + 1) * UNIT_ROUNDOFF[torch.float32])


@pytest.mark.parametrize(("block", "top_k"), [(None, 8), (7, 8), (1, 5), (61, 16)])
def test_blocks_give_what_whole_matrices_give(block: int | None, top_k: int) -> None:
    layers = random_layers(top_k)
    seen: list[int] = []
    found = prompt_similarity(layers, top_k, block=block, advance=seen.append)
    assert sum(seen) == TOKENS
    p, error = [whole_attention(layer) for layer in layers], share_error(layers, top_k)
    for a in range(LAYERS):
        for b in range(LAYERS):
            want = direct(p[a].mean(0), p[b].mean(0), top_k)[0] if a < b else 1.0
            assert float(found.layers[a, b]) == pytest.approx(want, abs=error, rel=0)
            for i in range(HEADS):
                for j in range(HEADS):
                    least, mean = direct(p[a][i], p[b][j], top_k) if a < b else (1.0, 1.0)
                    assert float(found.heads[a, b, i, j]) == pytest.approx(least, abs=error, rel=0)
                    assert float(found.head_means[a, b, i, j]) == pytest.approx(
                        mean, abs=error, rel=0
                    )


def test_layers_that_look_alike_are_similar_and_their_heads_are_found() -> None:
    first, other = random_layers(3)[:2]
    swapped = LayerQK(
        first.q.view(HEADS, GROUP, TOKENS, DIM).flip(0).flatten(0, 1),
        first.k.flip(0),
        first.scaling,
    )
    found = prompt_similarity([first, swapped, other], 8)
    assert found.heads[0, 1].argmax(0).tolist() == [1, 0]
    assert float(found.heads[0, 1, 1, 0]) == pytest.approx(1.0)
    assert found.heads[0, 2].max() < 0.9


def test_memory_follows_the_block_and_not_the_square_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_sparse.calibrate import similarity

    largest = 0
    attention = similarity.attention

    def measured(*args: object) -> torch.Tensor:
        nonlocal largest
        result = attention(*args)
        largest = max(largest, result.numel() * 4 * LAYERS)
        return result

    monkeypatch.setattr(similarity, "attention", measured)
    monkeypatch.setattr(similarity, "MOST_BLOCK_BYTES", 16_000)
    prompt_similarity(random_layers(1), 8)
    assert largest <= 16_000
