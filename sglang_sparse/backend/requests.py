# SPDX-License-Identifier: Apache-2.0
"""Per-request state of decoding: the options of a request, by its row in SGLang's request table.

It is written on the forward stream whenever a prefill chunk of the request is prepared. So when a
row gets a new owner, it is rewritten after the old owner's last decode step and before the new
owner's first.
"""

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparse import compat
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import SparseConfig
from sglang_sparse.launch import launch_of
from sglang_sparse.request_options import parse
from sglang_sparse_kernels.common import sent
from sglang_sparse_kernels.plan import DENSE_REQUEST, budget_row


class RequestTable:
    """Decode clocks and budgets of every request slot.

    Attributes:
        decode_start: int32 [request slots], tokens a request had when its last prefill ended,
            where its decode clock starts; ``DENSE_REQUEST`` for one that asked to be dense.
        budgets: int32 [request slots, 2], size of its lists: tokens, and a share of the domain in
            millionths.
        prefill_dense: on the host, whether each row of the last admitted batch asked to be dense.
    """

    def __init__(self, config: SparseConfig, columns: Columns) -> None:
        """Add the columns that the plan and the budget read, filled for the server's own budget."""
        self._config = config
        self.decode_start = columns.add("decode_start", (), torch.int32)
        self.budgets = columns.add("budget", (2,), torch.int32)
        self.budgets.copy_(torch.tensor(budget_row(*config.budget.list_size), dtype=torch.int32))
        self._asked = {
            name: columns.add(name, (), torch.float32, value)
            for name, value in config.budget.request_values.items()
        }
        self._dense = columns.add("dense", (), torch.bool)
        # The same on the host, where the graph is chosen.
        self._dense_slots: set[int] = set()
        self._dense_rows: list[bool] | None = None
        self.prefill_dense: list[bool] = []

    def admit(self, reqs: Sequence[Any], slots: torch.Tensor) -> None:
        """Store the options of a prefill batch.

        Args:
            reqs: SGLang's ``Req`` of each row.
            slots: int64 [rows], their request slots on the device.
        """
        rows: list[tuple[int, int, int]] = []
        asked: list[list[float]] = []
        for req in reqs:
            options = parse(req.sampling_params.custom_params, self._config)
            budget = options.budget or self._config.budget
            rows.append((*budget_row(*budget.list_size), int(options.dense)))
            asked.append(list(budget.request_values.values()))
            row = compat.current().request_row(req)
            if options.dense:
                self._dense_slots.add(row)
            else:
                self._dense_slots.discard(row)
        self.prefill_dense = [bool(dense) for _, _, dense in rows]
        written = sent(torch.tensor(rows, dtype=torch.int32), slots.device)
        self.budgets[slots] = written[:, :2]
        self._dense[slots] = written[:, 2].bool()
        for column, values in zip(self._asked.values(), zip(*asked, strict=True), strict=True):
            column[slots] = sent(torch.tensor(values, dtype=torch.float32), slots.device)

    def start_decoding(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the clocks of requests whose prefill reaches ``lengths`` (int32 [rows])."""
        self.decode_start[slots] = torch.where(self._dense[slots], DENSE_REQUEST, lengths)

    def expect(self, reqs: Sequence[Any]) -> None:
        """Note which rows of the decode batch that is prepared next asked to be dense."""
        dense, row = self._dense_slots, compat.current().request_row
        self._dense_rows = [row(req) in dense for req in reqs] if dense else None

    def longest_sparse(self, lengths: torch.Tensor) -> int:
        """Length of the longest row that may select; 0 if none may.

        Args:
            lengths: int [rows] on the host, of the batch given to :meth:`expect`. Further rows,
                which pad a graph's batch, count with their length.
        """
        dense_rows, self._dense_rows = self._dense_rows, None
        if dense_rows is not None:
            rows = min(len(dense_rows), lengths.numel())
            lengths = lengths.clone()
            lengths[:rows].masked_fill_(torch.tensor(dense_rows[:rows]), 0)
        return int(lengths.max()) if lengths.numel() else 0


def tell_backend(result: Any, cls: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
    """AFTER hook on ``ForwardBatch.init_new``: the last place that sees the batch's requests."""
    sparse = launch_of(model_runner.server_args) is not None and not model_runner.is_draft_worker
    if sparse and batch.reqs:
        model_runner.attn_backend.take_batch(batch.reqs, result)
    return result
