# SPDX-License-Identifier: Apache-2.0
"""The dense backends of SGLang that run all dense attention."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_sparse import compat
from sglang_sparse.backend.host_lengths import HostLengths
from sglang_sparse.backend.plan_copies import PlanCopies
from sglang_sparse.backend.runner import launch_of_runner
from sglang_sparse.backend.torch_native import TorchNativeBackend
from sglang_sparse.backend.window_view import View
from sglang_sparse.graph_variants import Variant
from sglang_sparse.pools import implementation
from sglang_sparse_kernels.common import Impl

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_ON = {"triton": "flashinfer", "cpu": "torch_native", "torch": "torch_native"}


def dense_backend(runner: ModelRunner) -> AttentionBackend:
    """The dense backend of a sparse server, for a runner that has no planes."""
    return InnerBackends(runner, *_asked(runner)).current


def dense_name(runner: ModelRunner) -> str:
    """SGLang's name of the dense backend of a sparse server."""
    return backend_name(*_asked(runner))


def backend_name(name: str, impl: Impl) -> str:
    """SGLang's name of a dense backend; ``name`` may be ``auto``."""
    return _ON[impl] if name == "auto" else name


def _asked(runner: ModelRunner) -> tuple[str, Impl]:
    """What the config names, maybe ``auto``, and what operators run as."""
    device = compat.resolved(runner.server_args).device
    return launch_of_runner(runner).config.inner, implementation(device)


class InnerBackends:
    """A dense backend; one for each variant where decode graphs are captured.

    Attributes:
        name: its name in SGLang.
        variant: the variant that the current batch is planned for.
        sparse_steps: whether it attends in the dense layers of sparse steps. SGLang's own for a CPU
            copies K and V a token at a time, and would take most of the step.
    """

    def __init__(self, runner: ModelRunner, name: str, impl: Impl) -> None:
        """``name`` is a backend of SGLang, or ``auto``."""
        self.name = backend_name(name, impl)
        own = impl == "cpu" and name == "auto"
        self.sparse_steps = not own
        self.variant: Variant = "dense"
        self._build = partial(TorchNativeBackend if own else ATTENTION_BACKENDS[self.name], runner)
        dense: AttentionBackend = self._build()
        self._of: dict[Variant, AttentionBackend] = {"dense": dense, "sparse": dense}
        on_gpu = impl == "triton"
        self._copies = PlanCopies(torch.cuda.Event() if on_gpu else None)
        # Prompts are planned on this one, whatever the step before was.
        # Chunks over a view (host memory, windows) were not checked in one piece.
        together = not isinstance(runner, View)
        flashinfer = on_gpu and self.name == "flashinfer"
        self._lengths = HostLengths(dense, together=together) if flashinfer else None

    @property
    def current(self) -> AttentionBackend:
        """The backend that the batch being run is planned on."""
        return self._of[self.variant]

    def plan(self, forward_batch: ForwardBatch, *, graph: bool, in_capture: bool = False) -> None:
        """Plan a batch on the current backend, once the plan before it has been copied.

        Args:
            forward_batch: the batch.
            graph: whether a captured graph reads the plan.
            in_capture: whether that graph is about to be captured.
        """
        self._copies.wait()
        if graph:
            self.current.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        else:
            with nullcontext() if self._lengths is None else self._lengths.of(forward_batch):
                self.current.init_forward_metadata(forward_batch)
        self._copies.sent()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate graph buffers for each variant.

        A backend keeps one set of buffers for each batch size, and both variants of a batch size
        are captured. So each variant plans on a backend of its own.
        """
        self._of["sparse"] = self._build()
        for inner in self._of.values():
            inner.init_cuda_graph_state(max_bs, max_num_tokens)
