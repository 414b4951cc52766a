# SPDX-License-Identifier: Apache-2.0
"""Training on several GPUs: every rank steps on rows of its own, with the mean of all gradients.

Ranks draw the same shapes, so they capture the same graphs; what depends on time or on accuracy is
decided by the first rank's clock and by sums over all of them, so no rank ends a stage alone.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that train together, as ``torchrun`` starts them; without it, one.

    Attributes:
        rank, count: this process's number, and how many there are.
        device: what this process computes on.
    """

    def __init__(self) -> None:
        """Join the others.

        Raises:
            ValueError: from torch, where ``torchrun``'s variables are not complete.
        """
        self.rank = int(os.environ.get("RANK", 0))
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.clocks = None
        if self.count > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
            # A second group on the host: telling the time waits for no kernel.
            self.clocks = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    def now(self) -> float:
        """Seconds on the first rank's clock, the same number on all."""
        seconds = torch.tensor([time.monotonic()], dtype=torch.float64)
        if self.clocks is not None:
            dist.broadcast(seconds, 0, group=self.clocks)
        return float(seconds)

    def mean(self, gradients: Tensor) -> None:
        """Replace ``gradients`` by their mean over ranks, in place and on the stream."""
        if self.count > 1:
            dist.all_reduce(gradients)
            gradients.div_(self.count)

    def add(self, counts: Tensor) -> None:
        """Replace ``counts`` by their sum over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(counts)

    def close(self) -> None:
        """Leave the others, after all of them came here.

        No CUDA graph may be left that holds a sum over ranks: NCCL would wait for it without end.
        """
        if self.count > 1:
            dist.barrier(group=self.clocks)
            dist.destroy_process_group()
