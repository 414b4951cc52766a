# SPDX-License-Identifier: Apache-2.0
"""Retention `all`: every token is held in SGLang's KV pool."""

from typing import Literal

from sglang_sparse.choices.interfaces import RetentionChoice


class KeepAll(RetentionChoice):
    """Every token is held."""

    kind: Literal["all"] = "all"
