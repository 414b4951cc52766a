# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels under the interpreter where there is no GPU, compiled where there is."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent))
