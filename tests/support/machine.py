# SPDX-License-Identifier: Apache-2.0
"""What machine the tests run on."""

from pathlib import Path

# Asked without importing torch: Triton's interpreter must be switched on before anything does.
HAS_GPU = Path("/dev/nvidiactl").exists()
