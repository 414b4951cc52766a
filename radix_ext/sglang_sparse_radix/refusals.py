# SPDX-License-Identifier: Apache-2.0
"""Server settings that are refused at start, since planes, tree or requests would be wrong.

Reads `sglang/srt/server_args.py` `ServerArgs` fields and `sglang/srt/environ.py` switches. A field
that this SGLang does not have cannot have been set, so it counts as allowed.
"""

from dataclasses import dataclass
from typing import Any

_LEAVE = "or serve without --attention-backend sparse"


@dataclass(frozen=True, slots=True)
class Rule:
    """A `ServerArgs` field and the values that the planes support."""

    field: str
    allowed: tuple[Any, ...]
    why: str

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.field.replace("_", "-")

    @property
    def allowed_text(self) -> str:
        """The allowed values, for messages."""
        names = ["unset" if a is None or a is False else str(a) for a in self.allowed]
        return " or ".join(dict.fromkeys(names))

    @property
    def remedy(self) -> str:
        """What to do about a value that is not allowed."""
        return f"start without {self.flag}, {_LEAVE}"

    def violation(self, value: object) -> str | None:
        """One line for a value that is not allowed, else None."""
        if value in self.allowed:
            return None
        return f"{self.flag} is {value!r}: {self.why}; allowed: {self.allowed_text}; {self.remedy}"


_OFF = (False, None)

RULES: tuple[Rule, ...] = (
    Rule("enable_lmcache", _OFF, "KV pages loaded by LMCache have no planes"),
    Rule("enable_flexkv", _OFF, "KV pages loaded by FlexKV have no planes"),
    Rule("enable_hisparse", _OFF, "its host-offloaded KV has no planes"),
    Rule(
        "disaggregation_mode",
        ("null", None),
        "KV received from another server has no planes yet",
    ),
    Rule(
        "disaggregation_decode_enable_offload_kvcache",
        _OFF,
        "KV offloaded to the host has no planes",
    ),
    Rule(
        "speculative_eagle_topk",
        (1, None),
        "accepted rows of a tree of drafts are moved, and planes do not follow",
    ),
    Rule(
        "decoupled_spec_role",
        ("null", None),
        "draft tokens that come from another server are not tested with planes",
    ),
    Rule("dllm_algorithm", (None,), "diffusion models rewrite KV rows that the planes cover"),
    Rule("dcp_size", (1, None), "decode context parallelism spreads a page over ranks"),
    Rule("attn_cp_size", (1, None), "context parallelism writes KV rows from other ranks"),
    Rule("enable_pdmux", _OFF, "it writes KV from two streams at once"),
    Rule("enable_page_major_kv_layout", _OFF, "the planes are defined for the per-layer KV layout"),
    Rule("enable_unified_memory", _OFF, "the planes are defined for the per-layer KV layout"),
    Rule("enable_session_radix_cache", _OFF, "it needs SGLang's unified radix cache"),
    Rule("enable_kv_cache_sharding", _OFF, "it spreads the pages of a request over ranks"),
    Rule(
        "enable_unified_cache_external_linker", _OFF, "KV pages loaded by a linker have no planes"
    ),
    Rule("enable_pd_role_switch", _OFF, "KV received from another server has no planes yet"),
    Rule("enable_streaming_session", _OFF, "session-held KV is not followed by the planes yet"),
    Rule(
        "radix_cache_backend",
        (None, "sparse"),
        "only this radix cache keeps planes and tree in step",
    ),
)

# With --enable-hierarchical-cache.
HOST_TIER_RULES: tuple[Rule, ...] = (
    Rule(
        "hicache_storage_backend",
        (None,),
        "it names KV by tokens alone, so sparse KV would come back as a dense request's",
    ),
    Rule("hicache_io_backend", ("kernel", "direct"), "other ways to copy KV are not tested"),
    Rule(
        "hicache_mem_layout",
        ("page_first", "page_first_direct", "layer_first"),
        "other layouts of KV on the host are not tested",
    ),
    Rule("speculative_algorithm", (None,), "it is not tested with KV in host memory"),
    Rule(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", None),
        "quantized KV is not tested in host memory",
    ),
)


def rules_for(flags: Any) -> tuple[Rule, ...]:
    """The rules that a server with these flags has to keep."""
    host_tier = getattr(flags, "enable_hierarchical_cache", False)
    return (*RULES, *HOST_TIER_RULES) if host_tier else RULES


_SWITCHES = {
    "SGLANG_USE_HND_KVCACHE": "the planes are defined for the per-layer NHD KV layout",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "the planes are sized before graph capture",
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "the C++ radix tree does not follow the planes",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "the unified radix tree does not follow the planes",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "verifications are planned on the stream that runs them",
    "SGLANG_RUST_SERVER": "it takes requests without the checks of this plugin",
    "SGLANG_GRPC_PORT": "gRPC takes requests without the checks of this plugin",
}


def unsupported_switch() -> tuple[str, str] | None:
    """(name, reason) of an environment switch that is set and not supported, else None."""
    from sglang.srt.environ import envs

    for name, why in _SWITCHES.items():
        switch = getattr(envs, name, None)
        if switch is not None and switch.get():
            return name, why
    return None


def find_unsupported(server_args: Any) -> str | None:
    """The first setting that the planes do not support, as one line; None when all is well.

    Args:
        server_args: SGLang's `ServerArgs`, resolved or not.

    Returns:
        A line naming flag, value, reason, what is allowed and what to do.
    """
    for rule in rules_for(server_args):
        line = rule.violation(getattr(server_args, rule.field, rule.allowed[0]))
        if line is not None:
            return line
    switch = unsupported_switch()
    if switch is None:
        return None
    name, why = switch
    return f"{name} is set: {why}; allowed: unset; unset {name}, {_LEAVE}"
