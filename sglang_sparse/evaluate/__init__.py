# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a running server, dense beside sparse: `sglang-sparse eval`.

Each prompt is asked once in every *arm*. One arm is dense, by the per-request switch, and each
budget is another. All arms run on the same server, so nothing else differs between them.
"""
