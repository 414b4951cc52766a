# SPDX-License-Identifier: Apache-2.0
"""Registers the backend, the tree and the hooks with SGLang.

Only the plugin's entry point imports this module.
"""

from sglang_sparse import compat


def register() -> None:
    """Register the flag's value, the backend, the tree and every hook. Runs once a process.

    On a version out of the supported range only the flags are hooked. Their check refuses the
    version by name.
    """
    from sglang.srt.server_args import add_attention_backend_choices

    from sglang_sparse.checks import BACKEND

    compat.install_hooks()
    if compat.is_supported():
        _register_parts()
    # Last: argparse accepts the name only if all of the above went through.
    add_attention_backend_choices([BACKEND])


def _register_parts() -> None:
    """Register the backend, the tree and the flags of ``sglang.Engine``."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_sparse.backend import create_backend
    from sglang_sparse.checks import BACKEND
    from sglang_sparse.flags import engine_server_args
    from sglang_sparse.prefixes import sparse_from
    from sglang_sparse_radix import tree_factory

    register_attention_backend(BACKEND)(create_backend)
    version = compat.current()
    tree_factory.register(
        version.tree_class(),
        version.hierarchical_tree_class,
        version.window_tree_class,
        sparse_from,
    )
    Engine.server_args_class = staticmethod(engine_server_args)
