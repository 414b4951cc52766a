# SPDX-License-Identifier: Apache-2.0
"""What the start-up line says of a server."""

from dataclasses import replace
from typing import Any

import pytest

from sglang_sparse import banner
from sglang_sparse.config import load_preset
from sglang_sparse.facts import Facts


def facts(model: str, preset: str, **changes: Any) -> Facts:
    """A server with one of the shipped presets, of numbers that are easy to find again."""
    config = load_preset(model, preset)
    plain = Facts(
        version="1.2.3",
        method=preset,
        source=f"{model}/{preset}",
        preset_hash="0123456789ab",
        axes={"layers": config.layers.model_dump(mode="json")},
        inner_backend="torch_native",
        implementation="torch",
        min_sparse_tokens=777,
        longest_row=8888,
        page_size=64,
        unit=config.unit,
        kv_heads=4,
        first_kv_head=0,
        total_kv_heads=4,
        ranks=1,
        layers={"dense": [5, 6], "select": [0, 1, 2], "reuse": [3]},
        streaming_heads={"select": 0, "reuse": 0},
        request_budget={},
        graphs={},
        plane_bytes={"page_min": 3 << 20, "page_max": 3 << 20},
        plane_dtypes={"page_min": "fp8", "page_max": "fp8"},
        kv_cache_dtype="fp8_e4m3",
        kv_bytes=48 << 20,
        state_bytes=5 << 19,
        step_tokens=1,
        decode_steps={},
        prefill_batches={},
        sglang="0.0.1",
        sglang_tested=["0.5.17", "0.5.23"],
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("model", "said"), [("llama-3.1-8b", "uncalibrated"), ("reference", "given")]
)
@pytest.mark.parametrize("preset", ["kascade", "kascade_sketch"])
def test_the_banner_says_whether_anchors_are_calibrated(model: str, said: str, preset: str) -> None:
    line = banner.text(facts(model, preset))
    anchors = list(load_preset(model, preset).layers.anchors)
    assert f"layers anchors(anchors={anchors}, " in line
    assert f"calibration={said})" in line


def test_the_banner_adds_up_planes_and_counts_layers_by_role() -> None:
    line = banner.text(facts("reference", "kascade"))
    assert "KV in fp8_e4m3, planes 6.0 MiB (12.5% of KV), state 2.5 MiB" in line
    assert "3 layers select, 1 layers reuse, 2 dense; rows of 777 to 8888 tokens sparse" in line
    assert "sparse, shorter ones dense" in line


def test_the_banner_names_the_element_type_of_a_sketch() -> None:
    dtypes = {"key_sketch": "int4", "key_sketch_scale": "float16"}
    line = banner.text(facts("reference", "sparcas", plane_dtypes=dtypes))
    assert "KV in fp8_e4m3, planes 6.0 MiB (12.5% of KV, sketch in int4), state" in line


def test_the_banner_warns_of_a_version_that_was_not_tested() -> None:
    line = banner.text(facts("reference", "kascade"))
    assert "sglang 0.0.1 (NOT TESTED, tested: 0.5.17 and 0.5.23)" in line


def test_the_banner_says_what_verified_drafts_attend_to() -> None:
    assert "verified" not in banner.text(facts("reference", "kascade"))
    line = banner.text(facts("reference", "kascade", step_tokens=4))
    assert "; 4 tokens verified a step on lists that they select together; " in line
