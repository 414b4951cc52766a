# SPDX-License-Identifier: Apache-2.0
"""Counting of decode steps on the device, for metrics."""

from .api import COUNTS, count_decode

__all__ = ["COUNTS", "count_decode"]
