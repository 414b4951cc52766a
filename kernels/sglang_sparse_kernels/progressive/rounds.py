# SPDX-License-Identifier: Apache-2.0
"""Progressive attention in rounds, for KV that is fetched between them (PSA, section 3.3).

A round attends to a part of each list. What the next one attends to is known after it, so only that
is to be fetched. The number of rounds is fixed; a row that has stopped takes no part in later ones.
"""

from dataclasses import replace

import torch

from ..common import IMPLS, Impl, check_choice, check_contiguous, check_dtype, check_shape
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from .api import check_attention, check_launch
from .rounds_reference import attend_round_reference, begin_rounds_reference
from .rounds_state import Rounds
from .types import ROUNDS, MassStop, StopState


def begin_rounds(
    plan: DecodePlan, ranking: Lists, stop: MassStop, state: StopState, rounds: Rounds, *,
    impl: Impl,
) -> None:  # fmt: skip
    """Say what the first round attends to: ``MORE_TOKENS`` more than was taken last time.

    Args:
        plan: R rows.
        ranking: as for :func:`.progressive_decode_attention`, without windows.
        stop: as there.
        state: ``expected`` is read.
        rounds: of round 0, R rows; rewritten.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    heads = ranking.indices.shape[1]
    _check_rounds(plan, ranking, state, rounds)
    stop.check(plan.num_rows, heads, -1, ranking.unit)
    if impl != "triton":
        begin_rounds_reference(plan, ranking, stop, state, rounds)
        rounds.epsilons.copy_(stop.epsilons[:, None])
        return
    from .rounds_kernel import begin_rounds_triton

    begin_rounds_triton(plan, ranking, stop, state, rounds)


def attend_round(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, rounds: Rounds, *, softmax: Softmax, out: torch.Tensor, impl: Impl,
) -> None:  # fmt: skip
    """Attend to a round's part of each list, and find which rows stop and where others go on.

    After round ``ROUNDS - 1`` all is written as
    :func:`sglang_sparse_kernels.progressive_decode_attention` writes it: outputs, stops, what is
    expected and counters, to the bit. What later rounds attend to may be anything till then.

    Round 0 attends to the tail and to the part that :func:`begin_rounds` said. Each round ends with
    the stop checks of what was attended to. A row goes on to where it stops at the latest, were
    nothing further on of any mass.

    Args:
        q: [R, H * G, D], as for :func:`.progressive_decode_attention`, as are all that follow.
        kv: KV rows of what this round and those before it attend to.
        plan: R rows.
        ranking: without windows.
        stop: as there.
        state: rewritten.
        rounds: of this round; its span becomes that of the next one.
        softmax: scale and cap of the logits.
        out: [R, H * G, D], q's dtype, contiguous. It is complete after the last round.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: as :func:`.progressive_decode_attention`, and on a round that there is not.
    """
    check_choice("impl", impl, IMPLS)
    if not 0 <= rounds.number < ROUNDS:
        raise ValueError(f"round {rounds.number} is none of {ROUNDS}")
    _check_rounds(plan, ranking, state, rounds)
    check_attention(q, kv, plan, ranking, stop, state, out)
    if impl != "triton":
        attend_round_reference(q, kv, plan, ranking, stop, state, rounds, softmax=softmax, out=out)
        return
    workspace = check_launch(q, kv, ranking, stop, state, out, rounds.workspace)
    from .rounds_kernel import attend_round_triton

    rounds = replace(rounds, workspace=workspace)
    attend_round_triton(q, kv, plan, ranking, stop, state, rounds, softmax=softmax, out=out)


def _check_rounds(plan: DecodePlan, ranking: Lists, state: StopState, rounds: Rounds) -> None:
    heads = ranking.indices.shape[1]
    ranking.check_read(plan.num_rows, heads)
    rounds.check(plan.num_rows, heads)
    if ranking.windows is not None:
        raise ValueError("lists with windows are not attended to in rounds")
    if state.expected is None:
        raise ValueError("rounds need what is expected of each request")
    check_shape("expected", state.expected, (-1, heads))
    check_dtype("expected", state.expected, torch.int32)
    check_contiguous("expected", state.expected)
