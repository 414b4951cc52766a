# SPDX-License-Identifier: Apache-2.0
"""Records of progressive attention: when to stop, state between steps, and scratch memory."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from ..common import Device, check_choice, check_contiguous, check_dtype, check_fits, check_shape
from ..records import Always, Softmax

Share = Literal["min", "mean"]
SHARES: tuple[str, ...] = get_args(Share)

MICROBATCHES = (16, 32, 64, 128)
"""Tokens that may be attended to between two stop checks."""

MAX_RANKED_UNITS = 4096
"""Units that a list may rank: they are sorted in the registers of one program."""

COUNTERS = ("pairs", "blocks", "domain_blocks", "share_millionths", "cap_hits")
"""Sums that the device keeps over sparse rows and KV heads: their number, units attended to, units
of their domains, estimated shares, and lists that ended before their share was reached."""

ROUNDS = 2
"""Rounds of attention whose KV is fetched round by round: a little more than the last step took,
and what is missing then."""

MORE_TOKENS = 128
"""Tokens that the first round takes beyond those of the last step. Whole microbatches, of any
size."""

MAX_PROLOGUE_CHUNKS = 32
"""Most chunks before the first microbatch. In a dense row they hold the whole context."""


def num_chunks(capacity_units: int, unit: int, microbatch: int) -> int:
    """Most chunks of one row and KV head: those of the prologue, then one a microbatch."""
    return MAX_PROLOGUE_CHUNKS + -(-capacity_units * unit // microbatch)


def num_stop_checks(capacity_units: int, unit: int, microbatch: int) -> int:
    """Most stop checks of one row and KV head: after the prologue, and after each microbatch."""
    return -(-capacity_units * unit // microbatch) + 1


def check_microbatch(microbatch: int, unit: int) -> None:
    """Raise ValueError unless whole units of ``unit`` tokens make up a microbatch."""
    if microbatch not in MICROBATCHES or microbatch % unit:
        raise ValueError(
            f"microbatch={microbatch} must be one of {MICROBATCHES}, in whole units of {unit}"
        )


@dataclass(frozen=True)
class MassStop:
    """When a row has reached enough of the attention mass (PSA, algorithm 1).

    Attributes:
        always: tokens that are selected whatever their scores, as the ranking has them.
        microbatch: tokens between two stop checks: 16, 32, 64 or 128.
        share: share of a group: "min" or "mean" of its query heads.
        epsilons: float32 [R], contiguous: the share that each row is to reach, in (0, 1].
        residual: [R, H, G, checks], from :func:`sglang_sparse_kernels.residual_bounds` of this
            step. With None each unit that is left is taken to hold the smallest mass so far.
    """

    always: Always
    microbatch: int
    share: Share
    epsilons: torch.Tensor
    residual: torch.Tensor | None = None

    def check(self, rows: int, heads: int, group: int, unit: int) -> None:
        """Raise ValueError unless this can stop ``rows`` rows of such a ranking."""
        check_choice("share", self.share, SHARES)
        check_microbatch(self.microbatch, unit)
        check_shape("epsilons", self.epsilons, (rows,))
        check_dtype("epsilons", self.epsilons, torch.float32)
        check_contiguous("epsilons", self.epsilons)
        if self.residual is not None:
            check_shape("residual", self.residual, (rows, heads, group, -1))


@dataclass(frozen=True)
class ResidualRule:
    """How the residual mass is bounded (:func:`sglang_sparse_kernels.residual_bounds`).

    Attributes:
        always: tokens that are selected whatever their scores, as the ranking has them.
        microbatch: tokens between two stop checks.
        softmax: scale and cap of the logits.
        margin: nats to take off, at least 0.
    """

    always: Always
    microbatch: int
    softmax: Softmax
    margin: float


@dataclass(frozen=True)
class StopState:
    """Where rows stopped, and sums over all stops.

    Attributes:
        reached: int32 [list rows, H], contiguous. A row's entry becomes the number of units that
            were attended to. Together with the ranking's indices this is a list as
            :func:`sglang_sparse_kernels.gathered_decode_attention` takes it.
        expected: int32 [request slots, H], contiguous: microbatches that each KV head of a request
            took in its last step; any numbers at first; rewritten. It only changes the time that
            "triton" takes. "torch" does not read it.
        counters: int64 [len(COUNTERS)], contiguous; this step's numbers are added. With None
            nothing is counted.
    """

    reached: torch.Tensor
    expected: torch.Tensor | None = None
    counters: torch.Tensor | None = None


@dataclass(frozen=True)
class ProgressiveWorkspace:
    """Fixed-capacity scratch, R rows, H KV heads, G query heads each, C chunks.

    Attributes:
        partial: float32 [R, H, C, G, D], attention over one chunk.
        lse: float32 [R, H, G, C], its log2 of the sum of exponentials.
        min_block: float32 [R, H, G, C], log2 of the smallest mass of a block in it.
        attended: int32 [R, H], chunks that the first launch attended to, as was expected.
        extended: int32 [R, H], chunks up to which the third launch goes on; ``attended`` if those
            are enough.
        stop: int32 [R, H], chunks up to the stop; more than ``attended`` if it lies behind those.
        candidates: int32 [R, H], units that may be attended to.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    min_block: torch.Tensor
    attended: torch.Tensor
    extended: torch.Tensor
    stop: torch.Tensor
    candidates: torch.Tensor

    def rows(self, batch_size: int) -> "ProgressiveWorkspace":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        check_fits(batch_size, self.lse)
        return ProgressiveWorkspace(
            **{field.name: getattr(self, field.name)[:batch_size] for field in fields(self)}
        )

    def heads_as_rows(self) -> "ProgressiveWorkspace":
        """A view with a row for each row and KV head."""
        return ProgressiveWorkspace(
            **{f.name: getattr(self, f.name).flatten(0, 1).unsqueeze(1) for f in fields(self)}
        )

    def nbytes(self) -> int:
        """Device bytes of all tensors."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def progressive_row_bytes(num_heads: int, num_kv_heads: int, head_dim: int, chunks: int) -> int:
    """Bytes of one row of :func:`make_progressive_workspace`."""
    return 4 * (chunks * num_heads * (head_dim + 2) + 4 * num_kv_heads)


def make_progressive_workspace(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, chunks: int, device: Device
) -> ProgressiveWorkspace:
    """Scratch for batches of up to ``max_rows`` rows.

    Args:
        max_rows: largest batch (R).
        num_heads: query heads (H * G) of this rank.
        num_kv_heads: KV heads (H) of this rank.
        head_dim: D.
        chunks: from :func:`num_chunks`.
        device: where it lives.
    """
    group = num_heads // num_kv_heads
    per_chunk = (max_rows, num_kv_heads, group, chunks)

    def words() -> torch.Tensor:
        return torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device)

    return ProgressiveWorkspace(
        partial=torch.zeros((max_rows, num_kv_heads, chunks, group, head_dim), device=device),
        lse=torch.zeros(per_chunk, device=device),
        min_block=torch.zeros(per_chunk, device=device),
        attended=words(),
        extended=words(),
        stop=words(),
        candidates=words(),
    )
