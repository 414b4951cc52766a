# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler for a GPU that is not there: kernels compile, and cannot be launched.

For processes of their own, that have ``TRITON_INTERPRET=0``.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class AbsentGPU:
    """A driver that knows a Hopper GPU by name alone."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_for_absent_gpu() -> None:
    """From here on, Triton compiles for :class:`AbsentGPU`; tensors lie on the CPU."""
    driver.set_active(AbsentGPU())
