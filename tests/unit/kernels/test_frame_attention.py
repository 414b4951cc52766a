# SPDX-License-Identifier: Apache-2.0
"""Attention over frames equals attention over resident KV, to the bit."""

import pytest
import torch
from frame_cases import same_bytes, steps_of
from kernel_cases import DEVICE
from tier import LAYERS, Tier

from sglang_sparse_kernels import Attend, AttendFrames, make_workspace

LENGTHS = [150, 1, 83, 96, 33]

# page size, unit, heads, group, dim, queries' dtype, dtype of KV, lists are mapped
CASES = {
    "pages": (16, 16, 2, 2, 64, torch.bfloat16, None, False),
    "half pages, fp8": (32, 16, 1, 4, 64, torch.bfloat16, torch.float8_e4m3fn, False),
    "tokens, reused lists": (32, 1, 3, 1, 128, torch.float16, None, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("impl", "steps"), steps_of(cpu=1000, triton=8))
def test_output_over_frames_equals_the_residents(impl: str, steps: int, case: tuple) -> None:
    *shape, mapped = case
    tier = Tier(tuple(shape), impl, 7, LENGTHS, capacity=3)
    batch, head_map = tier.batch, None
    if mapped:
        taken = [batch.heads - 1 - head for head in range(batch.heads)]
        head_map = torch.tensor(taken, dtype=torch.int32, device=DEVICE)
    workspace = make_workspace(
        len(LENGTHS), batch.heads * batch.group, batch.heads, batch.dim, DEVICE
    )
    for number in range(steps):
        rng = tier.begin_step(number)
        for layer in range(LAYERS):
            lists = batch.lists(*batch.random_lists(), head_map)
            q = torch.randn(batch.q.shape, generator=rng).to(DEVICE, batch.dtype)
            got = tier.attend(AttendFrames(tier.fetch(layer), workspace), q, lists)
            want = tier.attend(Attend(workspace), q, lists, layer)
            assert not want.isnan().any()
            assert same_bytes(got, want), f"step {number}"
    hits, loads, unserved, *_ = tier.pool.counters.tolist()
    assert hits > 0
    assert loads > 0
    assert unserved == 0
