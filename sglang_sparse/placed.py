# SPDX-License-Identifier: Apache-2.0
"""What a server refuses whose KV lies in host memory, beside what all refuse."""

import os
from typing import Any

from sglang_sparse import compat
from sglang_sparse.checks import check_rules, refuse
from sglang_sparse.config import ConfigError, Resolved, SparseConfig
from sglang_sparse.config.load import CONFIG_FLAG
from sglang_sparse.host_memory import free_host_bytes
from sglang_sparse_radix.refusals import Rule

PLACED_RULES = (
    Rule("tp_size", (1, None), "KV of several ranks in host memory is not tested yet"),
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16", None), "frames in fp8 are not tested yet"),
    Rule("speculative_algorithm", (None,), "drafts are not tested with frames yet"),
    Rule("enable_hierarchical_cache", (False, None), "all KV lies in host memory already"),
    Rule("enable_memory_saver", (False, None), "released frames are not restored"),
)
_PROBE = "SGLANG_SPARSE_PROBE"


def check_placed(args: Any, resolved: Resolved) -> None:
    """Refuse flags and versions under which KV could not lie in host memory; set what it needs.

    Args:
        args: parsed flags, before ``ServerArgs``.
        resolved: the configuration; one whose KV lies on the device passes.

    Raises:
        ConfigError: names the first offending flag, variable or the version.
    """
    if not resolved.config.placement.on_host:
        return
    kind = f"placement.kind={resolved.config.placement.kind}"
    if not compat.is_tested() or not compat.current().PLACES_ON_HOST:
        raise ConfigError(
            flag=CONFIG_FLAG,
            value=kind,
            problem=f"it was not tested on sglang {compat.sglang_version()}",
            allowed=f"sglang {compat.TESTED_SGLANG[0]}",
            remedy="install that version, or drop placement",
        )
    check_rules(args, PLACED_RULES)
    if os.environ.get(_PROBE) == "1":
        raise ConfigError(
            flag=_PROBE,
            value=os.environ[_PROBE],
            problem=f"it reads KV on the device, and not with {kind}",
            allowed="unset",
            remedy=f"unset {_PROBE}",
        )
    args.prefill_max_requests = _prompts(args.prefill_max_requests)


def _prompts(asked: int | None) -> int:
    """Prompts that share a prefill batch: one, unless asked otherwise; each takes device memory."""
    if asked is None:
        return 1
    if asked < 1:
        raise ConfigError(
            flag="--prefill-max-requests",
            value=str(asked),
            problem="no prompt would run",
            allowed="1 or more",
            remedy="leave it unset for one prompt at a time",
        )
    return asked


def check_first_page(args: Any, model: Any, config: SparseConfig) -> None:
    """Refuse, before ``ServerArgs``, ``host_bytes`` that hold too little of SGLang's ``model``."""
    if config.placement.on_host:
        size = model.dtype.itemsize if args.kv_cache_dtype in ("auto", None) else 2
        host_pages(config, cell_bytes(model, model.num_hidden_layers, size))


def cell_bytes(model: Any, layers: int, itemsize: int) -> int:
    """Host bytes of a token's keys and values in all layers."""
    return int(2 * model.get_num_kv_heads(1) * model.head_dim * itemsize * layers)


def host_pages(config: SparseConfig, cell: int) -> int:
    """Pages of tokens of ``cell`` bytes that ``host_bytes`` hold, beside SGLang's padding.

    Raises:
        ConfigError: there is none.
    """
    _, host_bytes = config.placement.room
    pages = host_bytes // (cell * config.page_size) - 1
    if pages < 1:
        raise refuse(
            CONFIG_FLAG,
            f"placement.host_bytes={host_bytes}",
            f"at least {2 * cell * config.page_size}",
            "raise it: it holds no page beside SGLang's padding",
        )
    return pages


def check_memory(args: Any, config: SparseConfig) -> None:
    """Refuse, before a model is loaded, more memory than there is even without one.

    What a model leaves, and whether memory can be pinned, shows when pools are made.

    Args:
        args: flags as SGLang resolved them.
        config: one whose KV lies on the device passes.

    Raises:
        ConfigError: ``host_bytes`` or ``device_bytes`` exceed what is free or there.
    """
    if not config.placement.on_host:
        return
    device_bytes, host_bytes = config.placement.room
    most = free_beside(host_bytes)
    if args.device != "cpu":
        from sglang.srt.utils.common import get_device_memory_capacity

        # SGLang asks the driver, so that this process does not begin to use a device.
        mebibytes = get_device_memory_capacity(args.device)
        if mebibytes is None:
            return
        most = int(mebibytes * 2**20 * args.mem_fraction_static)
    if device_bytes >= max(1, most):
        raise refuse_device(device_bytes, most, "there without a model")


def free_beside(host_bytes: int) -> int:
    """Host bytes that are free beside ``host_bytes``.

    Raises:
        ConfigError: so much is not free.
    """
    free = free_host_bytes()
    if host_bytes > free:
        raise refuse(
            CONFIG_FLAG,
            f"placement.host_bytes={host_bytes}",
            f"up to {free}, the free memory of this host or of its container",
            "lower it, or free memory",
        )
    return free - host_bytes


def refuse_device(device_bytes: int, most: int, where: str) -> ConfigError:
    """The refusal of ``device_bytes`` that the device has not."""
    return refuse(
        CONFIG_FLAG,
        f"placement.device_bytes={device_bytes}",
        f"below {most}, which are {where}",
        "lower it, raise --mem-fraction-static or, on a CPU, lower placement.host_bytes",
    )
