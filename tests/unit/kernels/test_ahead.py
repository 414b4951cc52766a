# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead: by other processes, once, and found by the first launch."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from absent_gpu import environment

# Prints a JSON object a line. What would be launched are the plans of decode steps.
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from absent_gpu import compile_for_absent_gpu
from triton import knobs
from sglang_sparse_kernels import ahead
from sglang_sparse_kernels.plan import (
    DecodePlan, PlanRules, RequestState, TokenTable, plan_decode, snapshot_page_table,
)

compile_for_absent_gpu()
table = torch.zeros((2, 128), dtype=torch.int32)
plan = DecodePlan.allocate(2, 4, torch.device("cpu"))
plan.page_table.fill_(-7)


def rehearse():
    for dtype in torch.int64, torch.int32:
        rows = torch.ones(2, dtype=dtype)
        tokens = TokenTable(table, rows, rows)
        budgets = torch.zeros((2, 2), dtype=torch.int32)
        state = RequestState(torch.zeros(2, dtype=torch.int32), budgets)
        rules = PlanRules(
            page_size=32, unit=32, capacity_units=2, min_sparse_tokens=64, reselect_every=1,
            refresh_every=1,
        )
        plan_decode(tokens, state, rules, plan=plan, impl="triton")
    snapshot_page_table(tokens, page_size=32, out=plan.page_table, impl="triton")
    snapshot_page_table(tokens, page_size=32, out=plan.page_table, impl="triton")


def tell(**facts):
    print(json.dumps(facts), flush=True)


if "ranks" in sys.argv:
    others = []

    def let_another_rank_compile(done, of):
        if done == 1 and not others:
            compiled = Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.ttir")
            others.append([path.stem for path in compiled])
            other = ahead.compile_ahead(rehearse, processes=1)
            others.append((other.found, other.compiled))

    done = ahead.compile_ahead(
        rehearse, processes=1, begin=0.7, progress=let_another_rank_compile
    )
    tell(others=others, found=done.found, compiled=done.compiled)
    sys.exit()
if "break" in sys.argv:
    ahead._WORKER = sys.argv[2]
steps = []
for _ in range(2):
    done = ahead.compile_ahead(
        rehearse, processes=2, progress=lambda done, of: steps.append((done, of))
    )
    tell(found=done.found, compiled=done.compiled, processes=done.processes,
         failures=done.failures, steps=steps)
tell(untouched=bool((plan.page_table == -7).all()))
if "break" not in sys.argv:
    # Triton's own way to a kernel, up to its launch.
    hits = []
    knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
    run = ahead.JITFunction.run
    ahead.JITFunction.run = lambda self, *a, warmup, **k: run(self, *a, warmup=True, **k)
    rehearse()
    tell(hits=hits)
"""


def told(folder: Path, *arguments: str) -> list[dict[str, object]]:
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], check=False, capture_output=True, text=True,
        env=os.environ | environment(folder)
        | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_processes_compile_each_kernel_once_and_the_first_launch_finds_it(tmp_path: Path) -> None:
    first, second, outputs, launches = told(tmp_path)
    assert first["compiled"] == 3
    assert first["found"] == 0
    assert first["processes"] == 2
    assert first["failures"] == []
    assert first["steps"] == [[0, 3], [1, 3], [2, 3], [3, 3]]
    assert second["found"] == 3
    assert second["compiled"] == second["processes"] == 0
    assert second["steps"] == first["steps"]
    assert outputs["untouched"]
    assert launches["hits"] == [True] * 3
    # Kernels of one kind of arguments share what launches them; Triton 3.8 has one for all.
    launchers = 2 if version("triton").startswith("3.6.") else 0
    assert len(list(tmp_path.glob("**/__triton_launcher*.so"))) == launchers


def test_ranks_begin_at_different_kernels_and_find_what_others_compiled(tmp_path: Path) -> None:
    (rank,) = told(tmp_path, "ranks")
    first, other = rank["others"]
    assert first == ["snapshot_page_table_kernel"]  # the last of three
    assert other == [1, 2]
    assert (rank["found"], rank["compiled"]) == (2, 1)


@pytest.mark.parametrize(
    ("worker", "failures"),
    [
        ("raise SystemExit(3)", ["", "", "1 kernels, as no process was left to compile them"]),
        (
            "import pickle, sys\nwhile pickle.load(sys.stdin.buffer): print('no', flush=True)",
            [": no"] * 3,
        ),
    ],
)
def test_what_cannot_be_compiled_is_left_for_its_first_launch(
    tmp_path: Path, worker: str, failures: list[str]
) -> None:
    first, _, outputs = told(tmp_path, "break", worker)
    assert first["compiled"] == 0
    found = first["failures"]
    assert isinstance(found, list)
    assert len(found) == len(failures)
    assert all(text.endswith(end) for text, end in zip(found, failures, strict=True)), found
    assert outputs["untouched"]
    assert not list(tmp_path.glob("**/*.cubin"))


# Prints the key of every kernel of the package, in the order of the names or against it.
KEYS = """
import importlib, json, pkgutil, sys
import sglang_sparse_kernels as package
from triton.language import constexpr
from triton.runtime.jit import JITFunction
from sglang_sparse_kernels.ahead import settle

found = {}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, JITFunction) and value.module == module.name:
            found[module.name + "." + name] = value
keys = {}
for name in sorted(found, reverse="backwards" in sys.argv):
    keys[name] = settle(found[name])
ambiguous = []
for name, function in found.items():
    constants = {(n, repr(v)) for (n, _), (v, _) in function.used_global_vals.items()
                 if isinstance(v, constexpr)}
    if len(dict(constants)) < len(constants):
        ambiguous.append(name)
print(json.dumps([keys, ambiguous]))
"""


def test_a_kernel_has_the_same_key_whatever_a_process_compiled_before() -> None:
    env = os.environ | {"TRITON_INTERPRET": "0"}
    found = []
    for order in ("forwards", "backwards"):
        command = [sys.executable, "-c", KEYS, order]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (keys, ambiguous), again = found
    assert len(keys) > 30
    assert [keys, ambiguous] == again
    # Triton orders constants of one name by where they lie in memory.
    assert ambiguous == []
