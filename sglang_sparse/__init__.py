# SPDX-License-Identifier: Apache-2.0
"""Training-free sparse attention for an unmodified SGLang server.

Importing this package costs nothing: SGLang imports it in every process through an entry point, so
nothing here may import sglang or torch.
"""

__version__ = "0.1.0"
