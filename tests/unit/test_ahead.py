# SPDX-License-Identifier: Apache-2.0
"""What is compiled before the first batch is all that batches launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang  # the program below imports it

PRESETS = Path(__file__).parents[2] / "configs" / "llama-3.1-8b"
# Prints the kernels that batches of many sizes launch, and those of them that were not rehearsed.
PROGRAM = """
import json, sys
from types import SimpleNamespace as Fake
import torch
from absent_gpu import compile_for_absent_gpu
from sglang_sparse.backend.ahead import rehearse
from sglang_sparse.backend.allocate import Heads, allocate
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels import KVScales, Softmax
from sglang_sparse_kernels.ahead import rehearsal
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

CPU, DIM = torch.device("cpu"), 128
HEADS, SLOTS, LONGEST, CHUNK = Heads(32, 8, DIM), 65, 100_000, 8192


def check(path):
    config = SparseConfig.model_validate(json.load(open(path)))
    size = config.page_size
    spec = PlaneSpec((*config.score.planes(), *config.budget.planes(config.score)))
    pool = bind_pool_class(spec, "triton")(
        size, page_size=size, dtype=torch.bfloat16, head_num=HEADS.kv, head_dim=DIM, layer_num=32,
        device="cpu", enable_memory_saver=False, start_layer=0, end_layer=32,
    )
    columns = Columns(SLOTS, CPU)
    requests = RequestTable(config, columns)
    build = allocate(config, pool, HEADS, columns, max_context=LONGEST, impl="triton")
    score, budget = config.score.build(build), config.budget.build(build, config.score)
    programs = compile_programs(config, build, score, budget)
    table = torch.zeros((SLOTS, LONGEST), dtype=torch.int32)
    decode = DecodeSteps(config, build, budget, programs, requests, table, None)
    prefill = config.prefill.build(build, config.score, programs)
    extend = ExtendSteps(build, prefill, requests, table, torch.bfloat16)
    softmax = Softmax(0.1)
    with rehearsal() as ready:
        rehearse(decode, extend, build, softmax, dtype=torch.bfloat16, chunk=CHUNK)
    mode = Fake(is_target_verify=lambda: False)
    with rehearsal() as launched:
        decode.allocate_for_graphs(64)
        for rows in 1, 2, 3, 7, 8, 12, 24, 33, 64:
            slots = torch.zeros(rows, dtype=torch.int64)
            batch = {"batch_size": rows, "req_pool_indices": slots, "seq_lens": slots + 9}
            decode.plan_batch(Fake(**batch, forward_mode=mode), graph=True)
            q = torch.zeros((rows, 32, DIM), dtype=torch.bfloat16)
            for program in programs.values():
                decode.run(program, q, softmax, KVScales())
            decode.update_planes()
        for start, new in (0, 1), (0, 77), (40_000, 8192), (90_000, 300), (99_000, 999):
            one = torch.tensor([1])
            extend.plan_batch(Fake(
                req_pool_indices=one, seq_lens=one * (start + new), extend_prefix_lens=one * start,
                extend_prefix_lens_cpu=[start], extend_seq_lens_cpu=[new],
            ))
            q = torch.zeros((new, 32, DIM), dtype=torch.bfloat16)
            for program in programs.values() if extend.batch is not None else ():
                extend.run(program, q, softmax, KVScales())
            extend.update_planes()
    late = sorted(name for name, key in launched.keys() - ready.keys())
    print(json.dumps({"launched": len(launched), "late": late}))


compile_for_absent_gpu()
for path in sys.argv[1:]:
    check(path)
"""


METHODS = ("kascade", "page_minmax", "psa", "lserve")


def test_no_batch_launches_what_was_not_rehearsed() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(PRESETS / f"{method}.json") for method in METHODS)],
        check=False, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for method, line in zip(METHODS, done.stdout.splitlines()[-len(METHODS) :], strict=True):
        facts = json.loads(line)
        assert facts["launched"] >= 5, method
        assert facts["late"] == [], method
