# SPDX-License-Identifier: Apache-2.0
"""The CPU platform itself, see :mod:`sglang_sparse.platform_cpu`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_sparse.checks import BACKEND
from sglang_sparse.platform_cpu import (
    CORES_OF_RANKS,
    MAX_RUNNING_REQUESTS,
    MAX_TOTAL_TOKENS,
    cores_of_ranks,
)
from sglang_sparse.speculation.flags import ALGORITHMS

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the CPU: no compiled kernels, no graphs."""

    # OOT is what makes SGLang ask this class for its pools and take `forward_native` everywhere.
    _enum = PlatformEnum.OOT
    _sparse = False

    def get_device(self, device_id: int | None = 0) -> str:
        """Name of the device that a start without ``--device`` takes.

        The mixin returns a ``torch.device``, and ``ServerArgs`` splits a name.
        """
        return self.device_name

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Switch off what needs an accelerator, and set sizes that the user left open.

        If no backend was asked for, SGLang has already chosen its AMX attention, whose kernels are
        missing wherever this platform serves.
        """
        self._sparse = server_args.attention_backend == BACKEND
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.tp_size > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault(CORES_OF_RANKS, cores_of_ranks(cores, server_args.tp_size))
        server_args.sleep_on_idle = True
        server_args.disable_cuda_graph = True
        for phase in (server_args.cuda_graph_config.decode, server_args.cuda_graph_config.prefill):
            phase.backend = "disabled"
        server_args.disable_overlap_schedule = True
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.grammar_backend is None:
            server_args.grammar_backend = "none"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Those that a sparse server has kernels for; 0.5.23 asks, after it set defaults."""
        return self._sparse and algorithm in ALGORITHMS

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Not Inductor, which seeks a C++ compiler for half a minute at the first token."""
        return "eager"

    def support_cuda_graph(self) -> bool:
        return False
