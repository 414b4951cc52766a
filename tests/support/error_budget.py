# SPDX-License-Identifier: Apache-2.0
"""How far a kernel may be from its float64 reference."""

import torch

UNIT_ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def dot_rounding(magnitude: torch.Tensor, terms: int) -> torch.Tensor:
    """Bound of the rounding of a float32 sum of ``terms`` products, in any order.

    ``magnitude`` is the sum of the products' absolute values; each of at most ``terms`` additions
    and one final scaling rounds by half a unit in the last place of at most that.
    """
    return (terms + 1) * UNIT_ROUNDOFF[torch.float32] * magnitude


def assert_within_budget(
    got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, rounding: float
) -> None:
    """The kernel's error may not exceed the eager low-precision error plus a rounding term.

    Errors are relative, in the Frobenius norm, against float64. ``eager`` is the result of plain
    PyTorch operations in the input's precision. ``rounding`` is derived from what the kernel
    rounds that eager does not (or in another order), and NaN never passes.
    """
    norm = exact.norm()
    kernel_error = float((got.double() - exact).norm() / norm)
    eager_error = float((eager.double() - exact).norm() / norm)
    assert kernel_error <= eager_error + rounding, (
        f"relative error {kernel_error:.3g} above eager's {eager_error:.3g} + {rounding:.3g}"
    )


def attention_rounding(products: torch.Tensor, dim: int, weighted: torch.Tensor) -> torch.Tensor:
    """Bound of the rounding of softmax attention in float32, for each entry of the output.

    A logit rounds as a sum of ``dim`` products does. A probability is off by that much twice, since
    its own logit and the sum's round, and by a roundoff for exp, division and each term of the sum.
    The output's sum over the tokens rounds once more a term.

    Args:
        products: [..., tokens], the sum of the absolute values of each logit's products.
        dim: D, terms of a logit.
        weighted: [..., D], the sum over the tokens of probability times absolute value.
    """
    tokens = products.shape[-1]
    logit = dot_rounding(products.amax(-1, keepdim=True), dim)
    return (2 * logit + (2 * tokens + 5) * UNIT_ROUNDOFF[torch.float32]) * weighted


def mass_rounding(products: torch.Tensor, dim: int) -> float:
    """Bound of the relative rounding of a sum of exp(logit) over the tokens, in float32.

    ``products`` as for :func:`attention_rounding`: each term is off by its logit's rounding and by
    that of exp, and each addition rounds.
    """
    logit = dot_rounding(products.amax(), dim)
    return float(logit) + (products.shape[-1] + 2) * UNIT_ROUNDOFF[torch.float32]


def attention_difference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> float:
    """Bound of how far two float32 results of attention over the same tokens lie apart.

    Each is off by :func:`attention_rounding`. The absolute products of a query with a key sum up to
    no more than the product of their norms, and a weighted mean of values to no more than the
    largest.

    Args:
        q: [..., D], all queries.
        k, v: [..., tokens, D], all keys and values.
        scale: factor on q.k.
    """
    products = q.norm(dim=-1).max() * k.norm(dim=-1).max() * scale
    each = attention_rounding(products.expand(k.shape[-2]), q.shape[-1], v.abs().max())
    return 2 * float(each)
