# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a running server, dense beside sparse: `sglang-sparse eval`.

Each prompt is asked once an *arm*: dense by the per-request switch, then each budget. All arms run
on the same server, so nothing else differs between them.
"""
