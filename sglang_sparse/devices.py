# SPDX-License-Identifier: Apache-2.0
"""Finds the device that serves. It imports nothing of SGLang, whose platforms ask this module."""

import os
from typing import Any

import torch

_ACCELERATORS = ("xpu", "npu", "musa", "hpu", "mps")


def is_plain_cpu() -> bool:
    """True where no accelerator is, and the CPU serves in plain PyTorch.

    ``SGLANG_USE_CPU_ENGINE=1`` asks for SGLang's own AMX engine and is respected.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return False
    if torch.version.hip is not None or torch.cuda.is_available():
        return False
    for name in _ACCELERATORS:
        module: Any = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            return False
    return True


def served_device() -> str | None:
    """Device that sparse attention runs on here: ``cpu``, ``cuda``, or None where it cannot."""
    if is_plain_cpu():
        return "cpu"
    return "cuda" if torch.version.hip is None and torch.cuda.is_available() else None
