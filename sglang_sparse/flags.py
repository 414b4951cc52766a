# SPDX-License-Identifier: Apache-2.0
"""``--sparse-method`` and ``--sparse-config``: from the command line or ``sglang.Engine`` to a
validated :class:`~sglang_sparse.launch.SparseLaunch` on SGLang's ``ServerArgs``."""

from __future__ import annotations

import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat
from sglang_sparse.bounded import BOUNDED_RULES, check_bounded
from sglang_sparse.checks import (
    BACKEND,
    check_flags,
    check_model,
    check_ranks,
    check_resolved,
    check_rules,
)
from sglang_sparse.config import ConfigError, Geometry, SparseConfig, resolve_with_source
from sglang_sparse.endpoints import check_preferred
from sglang_sparse.launch import SparseLaunch, attach
from sglang_sparse.placed import PLACED_RULES, check_first_page, check_memory, check_placed
from sglang_sparse.reach import check_reach, for_ranks
from sglang_sparse.speculation.flags import check_speculation
from sglang_sparse.windowed import WINDOWED_RULES, check_windowed
from sglang_sparse_radix.refusals import Rule

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

METHOD, CONFIG = "sparse_method", "sparse_config"


def add_cli_args(result: None, parser: ArgumentParser) -> None:
    """AFTER hook on ``ServerArgs.add_cli_args``: add the two flags."""
    group = parser.add_argument_group("sparse attention (with --attention-backend sparse)")
    group.add_argument(
        "--sparse-method",
        default=None,
        metavar="METHOD",
        help="How to select what each decode step attends to; names a preset for the model.",
    )
    group.add_argument(
        "--sparse-config",
        default=None,
        metavar="PRESET|PATH|JSON",
        help="A preset name, a JSON file, or inline JSON merged over the method's preset.",
    )


def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """AROUND hook on ``ServerArgs.from_cli_args``; ends the process with one line on bad input."""
    try:
        launch = prepare(args)
        return finish(original(cls, args), launch)
    except ConfigError as error:
        sys.exit(f"sglang-sparse: error: {error}")


def engine_server_args(**kwargs: Any) -> Any:
    """Stands in for ``Engine.server_args_class``: ``sglang.Engine(..., sparse_method=...)``.

    Raises:
        ConfigError: as on the command line, but for the caller to catch.
    """
    from sglang.srt.server_args import ServerArgs

    defaults = compat.current().declared_defaults()
    if isinstance(kwargs.get(CONFIG), Mapping):
        kwargs[CONFIG] = json.dumps(kwargs[CONFIG])
    args = Namespace(**{METHOD: None, CONFIG: None, **defaults, **kwargs})
    before = dict(vars(args))
    launch = prepare(args)
    changed = {name: value for name, value in vars(args).items() if before[name] is not value}
    for name in (METHOD, CONFIG):
        kwargs.pop(name, None)
        changed.pop(name, None)
    return finish(ServerArgs(**{**kwargs, **changed}), launch)


def finish(server_args: Any, launch: SparseLaunch | None) -> Any:
    """Check the flags as SGLang resolved them, then attach the configuration.

    Raises:
        ConfigError: a resolved value is not supported.
    """
    if launch is not None:
        resolved = compat.resolved(server_args)
        check_resolved(resolved, launch.config)
        check_rules(resolved, _rules_of(launch.config))
        check_memory(resolved, launch.config)
        check_speculation(resolved, launch.config)
        attach(server_args, launch)
    return server_args


def _rules_of(config: SparseConfig) -> tuple[Rule, ...]:
    """The rules of a config that holds KV elsewhere, or less of it."""
    if config.placement.on_host:
        return PLACED_RULES
    if config.retention.bounded:
        return BOUNDED_RULES
    return WINDOWED_RULES if config.retention.by_head else ()


def prepare(args: Namespace) -> SparseLaunch | None:
    """Validate the flags, and set the flags that the backend needs, before SGLang resolves them.

    Returns None for a dense server, whose flags stay exactly as they were.

    Raises:
        ConfigError: a flag, a config or a model cannot be served.
    """
    method, config_text = getattr(args, METHOD, None), getattr(args, CONFIG, None)
    chosen = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if BACKEND not in chosen:
        for flag, value in (("--sparse-method", method), ("--sparse-config", config_text)):
            if value is not None:
                raise ConfigError(
                    flag=flag,
                    value=value,
                    problem=f"--attention-backend is {args.attention_backend or 'not set'}",
                    allowed=f"{flag} together with --attention-backend {BACKEND}",
                    remedy=f"add --attention-backend {BACKEND}, or drop {flag}",
                )
        return None
    compat.verify_hooks()
    warning = compat.untested_warning()
    if warning is not None:
        logger.warning("sglang-sparse: %s", warning)
    if args.attention_backend != BACKEND:
        raise ConfigError(
            flag="--attention-backend",
            value=args.attention_backend,
            problem=f"only one of prefill and decode is {BACKEND}, and planes are built in prefill",
            allowed=BACKEND,
            remedy=f"use --attention-backend {BACKEND} alone",
        )
    model = compat.read_model_config(args)
    check_model(model, args.model_path)
    geometry = geometry_of(model, args.model_path)
    heads = geometry.num_key_value_heads
    resolved = for_ranks(
        resolve_with_source(method, config_text, geometry), heads, max(1, args.tp_size)
    )
    check_flags(args, resolved.config)
    check_speculation(args, resolved.config)
    check_preferred(args.preferred_sampling_params)
    check_ranks(resolved.config, geometry.num_hidden_layers, heads, args.tp_size)
    check_bounded(args, resolved)
    check_windowed(args, resolved)
    check_placed(args, resolved)
    check_first_page(args, model, resolved.config)
    check_reach(resolved, model.context_len, args.max_total_tokens)
    args.page_size = resolved.config.page_size
    args.radix_cache_backend = BACKEND
    return SparseLaunch(resolved)


def geometry_of(model: ModelConfig, name: str) -> Geometry:
    """The shape a preset is checked against (not divided by tensor parallelism)."""
    text = model.hf_text_config
    return Geometry(
        name=name,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=model.get_total_num_kv_heads(),
        head_dim=model.head_dim,
    )
