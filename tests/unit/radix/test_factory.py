# SPDX-License-Identifier: Apache-2.0
"""What the factory builds, and what it refuses with one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from radix_parts import DIM, HEADS, LAYERS, asked_for, build_context, make_pool, scheduler
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import create_tree_cache, get_radix_cache_factory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sglang_sparse import compat
from sglang_sparse.checks import ATTENTION_RULES
from sglang_sparse_radix.branches import SparseFrom
from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.radix_cache import SparseRadixCache
from sglang_sparse_radix.refusals import RULES, find_unsupported
from sglang_sparse_radix.tree_factory import create_sparse_radix_cache, register

P = 16


def create(context):
    version = compat.current()
    return create_sparse_radix_cache(
        context,
        cache_class=version.tree_class(),
        hierarchical_class=version.hierarchical_tree_class,
        window_class=version.window_tree_class,
        sparse_from=asked_for,
    )


def context(pool=None, **changes):
    requests = ReqToTokenPool(2, 4 * P, "cpu", False)
    if pool is None:
        pool = make_pool(PlaneSpec((PageBounds(),)), page_size=P, num_pages=4)
    return build_context(pool, page_size=P, requests=requests, **changes)


def test_the_flag_selects_the_sparse_radix_cache():
    cache = create_tree_cache(context())
    assert type(cache) is compat.current().tree_class()
    assert isinstance(cache, SparseRadixCache)
    assert isinstance(cache, RadixCache)


def test_registering_twice_is_harmless():
    before = get_radix_cache_factory("sparse")
    version = compat.current()
    for _ in range(2):
        register(
            version.tree_class(),
            version.hierarchical_tree_class,
            version.window_tree_class,
            asked_for,
        )
    assert get_radix_cache_factory("sparse") is before


def test_another_rule_for_sparse_requests_is_not_taken_in_silence():
    version = compat.current()
    with pytest.raises(ValueError, match="already registered"):
        register(
            version.tree_class(),
            version.hierarchical_tree_class,
            version.window_tree_class,
            lambda server_args, req: SparseFrom(),
        )


def test_a_disabled_radix_cache_is_what_sglang_builds():
    cache = create_tree_cache(context(disable_radix_cache=True))
    assert type(cache).__name__ == scheduler.DISABLED_TREE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_hisparse", True),
        ("disaggregation_mode", "prefill"),
        ("disaggregation_mode", "decode"),
        ("disaggregation_decode_enable_offload_kvcache", True),
        ("speculative_eagle_topk", 4),
        ("dllm_algorithm", "LowConfidence"),
        ("dcp_size", 2),
        ("attn_cp_size", 2),
        ("enable_pdmux", True),
        ("enable_page_major_kv_layout", True),
        ("enable_session_radix_cache", True),
        ("enable_streaming_session", True),
        ("radix_cache_backend", "flexkv"),
    ],
)
def test_unsupported_flags_are_refused_naming_flag_value_and_remedy(field, value):
    fields_set = {"radix_cache_backend": "sparse"} | {field: value}
    with (
        get_context().override_server_args(device="cpu", **fields_set),
        pytest.raises(ValueError, match="allowed:") as error,
    ):
        create(context())
    line = str(error.value)
    flag = "--" + field.replace("_", "-")
    assert line.startswith(f"{flag} is {value!r}: ")
    assert f"start without {flag}" in line
    assert "\n" not in line


def test_a_plain_server_is_supported():
    assert find_unsupported(ServerArgs(model_path="dummy")) is None


def test_every_rule_names_a_field_that_this_sglang_has():
    known = compat.current().declared_defaults().keys()
    named = {rule.field for rule in (*RULES, *ATTENTION_RULES)}
    assert named - known == scheduler.OTHER_FIELDS


@pytest.mark.parametrize(
    "switch",
    [
        "SGLANG_USE_HND_KVCACHE",
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        *scheduler.TREE_SWITCHES,
    ],
)
def test_unsupported_environment_switches_are_refused(switch):
    good = context()
    with (
        getattr(envs, switch).override(True),
        pytest.raises(ValueError, match=f"{switch} is set: .*unset {switch}"),
    ):
        create(good)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_hybrid_swa": True}, "hybrid sliding-window model"),
        ({"is_hybrid_ssm": True}, "hybrid state-space model"),
        ({"is_dsa": True}, "DeepSeek sparse attention model"),
    ],
)
def test_unsupported_models_and_builds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        create(context(**changes))


def test_a_pool_without_planes_is_refused():
    pool = MHATokenToKVPool(4 * P, P, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
    with pytest.raises(ValueError, match="got the KV pool MHATokenToKVPool"):
        create(context(pool))


def test_a_host_tier_refuses_a_checkpoint_that_makes_auto_fp8():
    spec = PlaneSpec((PageBounds(),))
    pool = make_pool(spec, page_size=P, num_pages=4, dtype=torch.float8_e4m3fn)
    assert isinstance(create(context(pool)), SparseRadixCache)
    with pytest.raises(
        ValueError, match=r"^--kv-cache-dtype is 'auto'.* fp8_e4m3: .*allowed: bf16"
    ):
        create(context(pool, enable_hierarchical_cache=True))


def test_a_tree_that_pages_otherwise_than_the_pool_is_refused():
    good = context()
    other = replace(good, params=replace(good.params, page_size=32))
    with pytest.raises(ValueError, match="--page-size is 16 in the KV pool but 32"):
        create(other)
