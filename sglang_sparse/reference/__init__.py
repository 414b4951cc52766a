# SPDX-License-Identifier: Apache-2.0
"""The small reference model: its tokenizer, training, export and study."""
