# SPDX-License-Identifier: Apache-2.0
"""Per-request state of decoding: what a request asked for, by its row in SGLang's request table.

Written on the forward stream whenever a prefill chunk of the request is prepared, so a row that
changes hands is rewritten before its new owner's first decode step, behind the old owner's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparse.config import FractionBudget, MassBudget, SparseConfig, TokenBudget
from sglang_sparse.launch import launch_of
from sglang_sparse.request_options import parse
from sglang_sparse_kernels.plan import DENSE_REQUEST, budget_row


class RequestTable:
    """Decode clocks and budgets of every request slot.

    Attributes:
        decode_start: int32 [request slots], tokens a request had when its last prefill ended,
            where its decode clock starts; ``DENSE_REQUEST`` for one that asked to be dense.
        budgets: int32 [request slots, 2], floor in tokens and fraction in millionths.
        epsilons: float32 [request slots], the share of the mass to reach; 0 under another budget.
        prefill_dense: on the host, whether each row of the last admitted batch asked to be dense.
    """

    def __init__(self, config: SparseConfig, request_slots: int, device: torch.device) -> None:
        self._config = config
        self._default = self._row(config.budget)
        self.decode_start = torch.zeros(request_slots, dtype=torch.int32, device=device)
        self.budgets = torch.tensor([self._default], dtype=torch.int32, device=device).repeat(
            request_slots, 1
        )
        share = self._share(config.budget)
        self.epsilons = torch.full((request_slots,), share, device=device)
        self._dense = torch.zeros(request_slots, dtype=torch.bool, device=device)
        # The same on the host, where the graph is chosen.
        self._dense_slots: set[int] = set()
        self._dense_rows: list[bool] | None = None
        self.prefill_dense: list[bool] = []

    @staticmethod
    def _row(budget: TokenBudget | FractionBudget | MassBudget) -> tuple[int, int]:
        return budget_row(budget.floor, budget.fraction)

    @staticmethod
    def _share(budget: TokenBudget | FractionBudget | MassBudget) -> float:
        return budget.epsilon if isinstance(budget, MassBudget) else 0.0

    def admit(self, reqs: Sequence[Any], slots: torch.Tensor) -> None:
        """Store the options of a prefill batch.

        Args:
            reqs: SGLang's ``Req`` of each row.
            slots: int64 [rows], their request slots on the device.
        """
        rows, shares = [], []
        for req in reqs:
            options = parse(req.sampling_params.custom_params, self._config)
            budget = self._default if options.budget is None else self._row(options.budget)
            rows.append((*budget, int(options.dense)))
            shares.append(self._share(options.budget or self._config.budget))
            if options.dense:
                self._dense_slots.add(req.req_pool_idx)
            else:
                self._dense_slots.discard(req.req_pool_idx)
        self.prefill_dense = [bool(dense) for _, _, dense in rows]
        written = self._sent(torch.tensor(rows, dtype=torch.int32), slots)
        self.budgets[slots] = written[:, :2]
        self._dense[slots] = written[:, 2].bool()
        self.epsilons[slots] = self._sent(torch.tensor(shares, dtype=torch.float32), slots)

    @staticmethod
    def _sent(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``rows`` where ``slots`` are, without waiting."""
        return (rows.pin_memory() if slots.is_cuda else rows).to(slots.device, non_blocking=True)

    def start_decoding(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the clocks of requests whose prefill reaches ``lengths`` (int32 [rows])."""
        self.decode_start[slots] = torch.where(self._dense[slots], DENSE_REQUEST, lengths)

    def expect(self, reqs: Sequence[Any]) -> None:
        """Note which rows of the decode batch that is prepared next asked to be dense."""
        dense = self._dense_slots
        self._dense_rows = [req.req_pool_idx in dense for req in reqs] if dense else None

    def longest_sparse(self, lengths: torch.Tensor) -> int:
        """Length of the longest row that may select; 0 if none may.

        Args:
            lengths: int [rows] on the host, of the batch told to :meth:`expect`; rows behind
                those, which pad a graph's batch, count as they are.
        """
        dense_rows, self._dense_rows = self._dense_rows, None
        if dense_rows is not None:
            rows = min(len(dense_rows), lengths.numel())
            lengths = lengths.clone()
            lengths[:rows].masked_fill_(torch.tensor(dense_rows[:rows]), 0)
        return int(lengths.max()) if lengths.numel() else 0

    def nbytes(self) -> int:
        """Device bytes of the table."""
        kept = (self.decode_start, self.budgets, self.epsilons, self._dense)
        return sum(tensor.nbytes for tensor in kept)


def tell_backend(result: Any, cls: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
    """AFTER hook on ``ForwardBatch.init_new``: the last place that sees the batch's requests."""
    if launch_of(model_runner.server_args) is not None and batch.reqs:
        table: RequestTable = model_runner.attn_backend.requests
        if result.forward_mode.is_decode_or_idle():
            table.expect(batch.reqs)
        else:
            table.admit(batch.reqs, result.req_pool_indices)
    return result
