# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler for a GPU that is not there: kernels compile, and cannot be launched.

For processes of their own, that have :func:`environment`.
"""

import subprocess
from pathlib import Path

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


# What launchers link with; nothing of it is called.
_CUDA = """cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDevicePrimaryCtxRetain cuFuncSetAttribute
cuGetErrorString cuPointerGetAttribute"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process that compiles; ``folder`` gets a driver library, in name alone."""
    source = folder / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in _CUDA.split()))
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    paths = dict.fromkeys(("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"), str(folder))
    return {"TRITON_INTERPRET": "0", **paths}
