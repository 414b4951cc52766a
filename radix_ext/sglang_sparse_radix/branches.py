# SPDX-License-Identifier: Apache-2.0
"""Which KV may be the prefix of which request, as branches of the radix tree.

K and V of a token follow from its hidden states, and those follow from what every token up to it
attended to. So the tree keeps KV that saw sparse attention on branches of its own:

  trunk: KV computed by dense attention alone. Its nodes have the client's `extra_key`, as in
      SGLang's own tree.
  prefill branch: KV that saw a sparse prompt.
  decode branch: KV that saw sparse decode steps at one budget; one branch a budget.

A branch begins at the end of a node and never leads back: what is computed on top of KV that saw
sparse attention saw it too. A request looks its prefix up in the trunk and in the branches of its
own way of attending. A dense request thus finds dense KV only.

A page belongs to the first branch on which all of its tokens may lie. So one token that saw sparse
attention keeps its whole page off the trunk.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

NEVER = 1 << 62
_PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Branch:
    """The extra key of nodes on a branch. No JSON value equals it, so no client can send it.

    Attributes:
        client_key: the `extra_key` that the client sent.
        saw: what the KV saw: sparse prompts, or decoding at a budget.
    """

    client_key: str | None
    saw: Hashable


ExtraKey = str | Branch | None


@dataclass(frozen=True, slots=True)
class SparseFrom:
    """The positions from which a request attends sparsely.

    Attributes:
        prefill: first prompt position that may attend sparsely; None if prompts are dense.
        decode: first decoded position that may attend sparsely; None for a dense request.
        budget: names the request's budget; requests of one budget share what they decode.
    """

    prefill: int | None = None
    decode: int | None = None
    budget: Hashable = None


DENSE = SparseFrom()


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a request's path through the tree: up to `end` tokens, on one branch."""

    extra_key: ExtraKey
    end: int


def allowed(sparse: SparseFrom, client_key: str | None, page_size: int) -> list[Section]:
    """The branches that a request may find its prefix on, in the order of the path.

    Where the prompt of a request would itself be sparse, dense KV may not be its prefix either. So
    its result does not depend on what was cached.

    Args:
        sparse: from where the request attends sparsely.
        client_key: the `extra_key` that its client sent.
        page_size: tokens of a page.

    Returns:
        The trunk and then each branch, with the position where the request has to leave it.
    """
    found = [Section(client_key, _aligned(sparse.prefill, page_size))]
    if sparse.prefill is not None:
        found.append(Section(Branch(client_key, _PREFILL), NEVER))
    if sparse.decode is not None:
        found.append(Section(Branch(client_key, ("decode", sparse.budget)), NEVER))
    return found


def sections(
    sparse: SparseFrom,
    client_key: str | None,
    *,
    matched: Mapping[ExtraKey, int],
    prefilled: int,
    page_size: int,
) -> list[Section]:
    """Where a request's own KV belongs.

    Args:
        sparse: from where it attends sparsely.
        client_key: the `extra_key` that its client sent.
        matched: tokens of its prefix that the tree holds, by branch.
        prefilled: tokens that had been prefilled when its last prefill ended; later tokens were
            decoded.
        page_size: tokens of a page.

    Returns:
        The request's path; the last section has no end.
    """
    starts: dict[ExtraKey, int] = {}
    if sparse.prefill is not None:
        reached = sparse.prefill if prefilled > sparse.prefill else None
        starts[Branch(client_key, _PREFILL)] = _aligned(reached, page_size)
    if sparse.decode is not None:
        start = max(prefilled, sparse.decode)
        starts[Branch(client_key, ("decode", sparse.budget))] = _aligned(start, page_size)
    keys = [client_key, *starts]
    path, end = [], 0
    for index, key in enumerate(keys):
        end += matched.get(key, 0)
        later = keys[index + 1 :]
        if not any(matched.get(other) for other in later):
            end = max(end, min((starts[other] for other in later), default=NEVER))
        path.append(Section(key, end))
    return path


def _aligned(position: int | None, page_size: int) -> int:
    return NEVER if position is None else position // page_size * page_size
