# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel on the GPU and check it: ``python kernels/bench/smoke.py``."""

import torch
from cases import Case, Shape
from lserve import check_all

SHAPES = (
    (Shape(context=5000, batch=3), 1),
    (Shape(context=40_001, batch=1), 1),
    (Shape(context=32_001, batch=1, max_context=131_076, key_scale=1e-4), 1),
    (Shape(context=131_072, batch=2, max_context=131_076), 1),
    (Shape(context=131_072, batch=2, max_context=131_076), 16),
    (Shape(context=3001, batch=2, heads=2, group=8, dim=64, page_size=32, sketch="int8"), 1),
    (Shape(context=2500, batch=2, heads=4, group=1, dtype=torch.float16, sketch="bf16"), 1),
    (Shape(context=9000, batch=5, group=3, page_size=16), 16),
    (Shape(context=2100, batch=1, heads=1, group=16, dim=64, dtype=torch.float16), 16),
)


def main() -> None:
    """Check small shapes of every kind; the exit code is non-zero if one is wrong."""
    device = torch.device("cuda")
    for shape, unit in SHAPES:
        torch.manual_seed(shape.context)
        print(shape, "unit", unit, Case(shape, layers=2, unit=unit, device=device).check())
    torch.manual_seed(0)
    print("lserve", check_all(["decode", "prefill"]))
    print("all kernels agree with their references")


if __name__ == "__main__":
    main()
