# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for SGLang, so that the real server runs where no accelerator is.

SGLang's own ``--device cpu`` needs compiled AMX kernels that PyPI does not carry. An out-of-tree
platform that reports a plain CPU makes every operator take its native PyTorch form instead.
Entry point: ``sglang.srt.platforms``; :func:`activate` returns None wherever an accelerator is,
so installing this package never changes what a GPU machine does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_sparse import devices

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# SGLang would size its pools to fill the host's memory, and its scheduler would spin while idle.
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 16


def activate() -> str | None:
    """Dotted name of the CPU platform class, or None where something else should serve."""
    return f"{__name__}.{NativeCpuPlatform.__name__}" if devices.is_plain_cpu() else None


class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the CPU: no compiled kernels, no graphs, one rank."""

    # OOT is what makes SGLang ask this class for its pools and take `forward_native` everywhere.
    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        """Name of the device that a start without ``--device`` takes.

        The mixin returns a ``torch.device``, and ``ServerArgs`` splits a name.
        """
        return self.device_name

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Switch off what needs an accelerator, and set sizes that the user left open.

        SGLang has chosen its AMX attention by now if no other was asked for; its kernels are
        missing wherever this platform serves.
        """
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        server_args.sleep_on_idle = True
        server_args.disable_cuda_graph = True
        for phase in (server_args.cuda_graph_config.decode, server_args.cuda_graph_config.prefill):
            phase.backend = "disabled"
        server_args.disable_overlap_schedule = True
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.grammar_backend is None:
            server_args.grammar_backend = "none"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang_sparse.pools import kv_pool_class

        return kv_pool_class()

    def get_paged_allocator_cls(self) -> type:
        from sglang_sparse_radix.allocator import TorchPagedTokenToKVPoolAllocator

        return TorchPagedTokenToKVPoolAllocator

    def support_cuda_graph(self) -> bool:
        return False
