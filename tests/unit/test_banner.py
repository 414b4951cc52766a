# SPDX-License-Identifier: Apache-2.0
"""What the start-up line says of a choice."""

from __future__ import annotations

import pytest

from sglang_sparse.banner import _choice
from sglang_sparse.config import load_preset


@pytest.mark.parametrize(
    ("model", "said"), [("llama-3.1-8b", "uncalibrated"), ("reference", "given")]
)
def test_the_banner_says_whether_anchors_are_calibrated(model: str, said: str) -> None:
    for name in ("kascade", "kascade_sketch"):
        layers = load_preset(model, name).layers
        anchors = list(layers.anchors)
        line = _choice(layers.model_dump(mode="json"))
        assert line.startswith(f"anchors(anchors={anchors}, ")
        assert line.endswith(f"calibration={said})")
