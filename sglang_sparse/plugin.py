# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group ``sglang.srt.plugins``: SGLang calls :func:`load` in each process."""


def load() -> None:
    """Register everything. A failure here is logged by SGLang, and the backend's name stays
    unknown, so that ``--attention-backend sparse`` is refused instead of served densely."""
    from sglang_sparse import hooks

    hooks.register()
