# SPDX-License-Identifier: Apache-2.0
"""What is compiled before the first batch is all that batches launch."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from absent_gpu import environment

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
# The same over KV in host memory, with an odd number of pages. It compiles what it rehearsed.
HOSTED = """
import json, os, sys
import torch
from types import SimpleNamespace as Fake
from absent_gpu import compile_for_absent_gpu
from host_kv_harness import BUDGETS, LAYERS, SLOTS, HEADS, GROUP, DIM, Twins, make_config
import host_kv_harness
from sglang_sparse.backend.ahead import rehearse
from sglang_sparse_kernels import KVScales, Softmax
from sglang_sparse_kernels.ahead import compile_ahead, rehearsal, watch_launches

compile_for_absent_gpu()
host_kv_harness.IMPL = "triton"
config = make_config(16, **BUDGETS[sys.argv[1]])
twins = Twins(config, pages=13)
side, frames = twins.hosted, twins.frames
softmax = Softmax(0.1)


def ahead():
    rehearse(side.decode, side.extend, side.build, softmax, dtype=torch.bfloat16, chunk=512)


with rehearsal() as ready:
    ahead()
mode = Fake(is_target_verify=lambda: False)
with rehearsal() as launched:
    for rows in range(1, SLOTS):
        slots = torch.arange(rows)
        batch = {"batch_size": rows, "req_pool_indices": slots, "seq_lens": slots * 0 + 16}
        side.decode.plan_batch(Fake(**batch, forward_mode=mode), graph=True)
        q = torch.zeros((rows, HEADS * GROUP, DIM), dtype=torch.bfloat16)
        for layer, program in side.programs.items():
            frames.store(layer, q[:, :HEADS], q[:, :HEADS], slots)
            side.decode.run(program, q, softmax, KVScales())
            side.decode.end_layer(layer)
    for start, new in (0, 1), (0, 77), (16, 20), (48, 16):
        one = torch.tensor([1])
        side.extend.plan_batch(Fake(
            req_pool_indices=one, seq_lens=one * (start + new), extend_prefix_lens=one * start,
            extend_prefix_lens_cpu=[start], extend_seq_lens_cpu=[new],
        ))
        for layer in range(LAYERS):
            side.extend.begin_layer(layer)
            side.extend.end_layer(layer)
late = sorted(name for name, key in launched.keys() - ready.keys())
result = compile_ahead(ahead, processes=1, progress=lambda done, of: None)
on_disk = sum(kernel.is_on_disk() for kernel in ready.values())
told = []
for _ in range(2):
    watch_launches(lambda name, seconds: told.append((name, seconds > 0)))
kernel = next(iter(ready.values()))
kernel.compile()
os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
kernel.compile()
kernel.compile()
print(json.dumps({
    "ready": len(ready), "on_disk": on_disk, "told": told, "first": kernel.name,
    "launched": sorted({name for name, key in launched}), "late": late,
    "failures": list(result.failures), "compiled": result.compiled + result.found,
}))
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


@pytest.mark.skipif(version("sglang") != "0.5.17", reason="refused with this version of SGLang")
@pytest.mark.parametrize("budget", ["tokens", "scores", "reuse"])
def test_no_batch_over_kv_in_host_memory_launches_what_was_not_rehearsed(
    budget: str, tmp_path: Path
) -> None:
    tests = Path(__file__).parents[1]
    folders = [str(tests / "support"), str(tests / "unit" / "radix"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", HOSTED, budget, str(tmp_path / "cache")],
        check=False, capture_output=True, text=True,
        env=os.environ | environment(tmp_path) | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["late"] == []
    assert facts["failures"] == []
    # A launch finds on disk what was compiled ahead, and is reported where it does not.
    assert facts["on_disk"] == facts["ready"]
    assert facts["told"] == [[facts["first"], True]]
    names = {name.rpartition(".")[2] for name in facts["launched"]}
    assert {"copy_blocks_kernel", "flush_pages_kernel", "store_tokens_kernel"} <= names
    rounds = {"begin_rounds_kernel", "attend_round_kernel", "finish_round_kernel"}
    assert names & rounds == (rounds if budget == "scores" else set())
