# SPDX-License-Identifier: Apache-2.0
"""Keeps a plan of FlashInfer in pinned memory until the device has copied it.

FlashInfer's ``plan`` writes to a pinned buffer of its wrapper and has the device copy it, without
waiting (``flashinfer/data/include/flashinfer/attention/scheduler.cuh``, ``cudaMemcpyAsync``). The
overlap scheduler plans a step while the device may still be about to copy the plan of the one
before, for instance because other processes use the GPU, too. That step would then run by the next
one's plan: a chunk that begins behind the end of its request has a negative length, which
``decode.cuh`` counts as some four thousand million tokens.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A CUDA event."""

    def record(self) -> None:
        """Mark what the current stream has been given so far."""

    def synchronize(self) -> None:
        """Return when the device has got there."""


class PlanCopies:
    """Orders a plan behind the device's copy of the last one; costs nothing once that is done."""

    def __init__(
        self,
        event: Event | None,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        """
        Args:
            event: a CUDA event; None on a CPU, where nothing is copied.
            capturing: whether a graph is being captured, when nobody may wait.
        """
        self._event, self._capturing, self._recorded = event, capturing, False

    def wait(self) -> None:
        """Call before a plan is made: return when the last one has been copied."""
        if self._event is not None and self._recorded and not self._capturing():
            self._event.synchronize()

    def sent(self) -> None:
        """Call behind a plan, on the stream that copies it."""
        if self._event is not None and not self._capturing():
            self._event.record()
            self._recorded = True
