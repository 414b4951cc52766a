# SPDX-License-Identifier: Apache-2.0
"""How far rounding may move what a server of the reference model reports."""

from functools import cache

from error_budget import UNIT_ROUNDOFF
from live_server import MODEL
from machine import HAS_GPU
from torch import bfloat16, float32

from sglang_sparse.research.export import load

ROUNDOFF = UNIT_ROUNDOFF[bfloat16 if HAS_GPU else float32]


@cache
def largest_logit() -> float:
    """No logit of the reference model is larger: a bound from its weights.

    A logit is the product of an embedding and a normed hidden state, whose entries have a root mean
    square of one before the norm's weights.
    """
    model = load(MODEL)
    embeddings = model.model.embed_tokens.weight * model.model.norm.weight
    return float(embeddings.norm(dim=1).max()) * model.config.hidden_size**0.5


@cache
def logprob_error(tokens: int) -> float:
    """Bound of what another order of sums changes in a log-probability after ``tokens`` tokens.

    Roundings add up like a random walk: n of them exceed 6 sqrt(n) roundoffs of the magnitude in
    fewer than one of ten million cases (Higham and Mary 2019, theorem 2.4). Each layer adds two
    sums to the hidden state, one of attention over the context and one of the MLP, and a logit is
    one more. None has more terms than the context or the MLP. A log-probability is a logit less the
    logarithm of a sum over all logits, each of which is off by as much.
    """
    config = load(MODEL).config
    terms = (2 * config.layers + 1) * max(tokens, config.intermediate_size)
    return 2 * 6 * terms**0.5 * ROUNDOFF * largest_logit()
