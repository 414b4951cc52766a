# SPDX-License-Identifier: Apache-2.0
"""Sums over decode steps, counted on the device. No step waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sglang_sparse.choices.build import Build
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.count import COUNTS, count_decode
from sglang_sparse_kernels.plan import DecodePlan


class DeviceSums:
    """Sums on the device, and the last of their snapshots that reached the host."""

    def __init__(self, names: Sequence[str], row: torch.Tensor) -> None:
        """``row`` is int64 [names], added to by others."""
        self._names, self._row = names, row
        on_gpu = row.is_cuda
        self._host = torch.zeros(len(names), dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._asked = self._pending = False

    def offer(self) -> None:
        """Start the snapshot that was asked for, on the stream that adds to the sums."""
        if not self._asked:
            return
        self._host.copy_(self._row, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._asked, self._pending = False, True

    def poll(self) -> dict[str, int] | None:
        """The snapshot that an earlier call asked for, if it has arrived; asks for the next one."""
        if self._pending and (self._copied is None or self._copied.query()):
            self._pending = False
            self._asked = True
            return dict(zip(self._names, self._host.tolist(), strict=True))
        self._asked = not self._pending
        return None

    def read(self) -> dict[str, int]:
        """The current sums. This waits for the device, so only an idle server or a request asks.

        A snapshot on its way is older and is dropped; sums only grow.
        """
        self._asked = self._pending = False
        return dict(zip(self._names, self._row.tolist(), strict=True))


class DecodeCounters:
    """Sums over decode steps, from plans, which hold for every selecting layer alike."""

    def __init__(
        self,
        *,
        unit: int,
        capacity_units: int,
        window: int = 0,
        impl: Impl,
        device: torch.device,
    ) -> None:
        """All zeros. ``unit`` and ``window`` in tokens, ``capacity_units`` as the lists have it.

        ``window`` is what a streaming head sees.
        """
        self._add = partial(
            count_decode, unit=unit, capacity_units=capacity_units, window=window, impl=impl
        )
        self._row = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._sums = DeviceSums(COUNTS, self._row)
        self.changed = False

    @classmethod
    def of(cls, build: Build, window: int) -> DecodeCounters:
        """Counters of one server, whose streaming heads see ``window`` tokens."""
        return cls(
            unit=build.unit, capacity_units=build.limits.capacity_units, window=window,
            impl=build.impl, device=build.device,
        )  # fmt: skip

    def count(self, plan: DecodePlan, budgets: torch.Tensor) -> None:
        """Add one decode step; runs where the plan was made, on the forward stream."""
        self._add(plan, budgets, self._row)
        self.changed = True
        self._sums.offer()

    def poll(self) -> dict[str, int] | None:
        """See :meth:`DeviceSums.poll`."""
        return self._sums.poll()

    def read(self) -> dict[str, int]:
        """See :meth:`DeviceSums.read`."""
        self.changed = False
        return self._sums.read()
