# SPDX-License-Identifier: Apache-2.0
"""The cascading cache, one layer of an 8B model: a stride of a prompt, and a decode step.

    python kernels/bench/cascade.py --out cascade.json [--tiles]

Outputs are compared with the definition's first. FlashInfer's `fa3` attends to the same keys. With
`--tiles` other tiles of the prompt's kernels are timed too.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kascade import milliseconds
from timing import launches, time_calls

from sglang_sparse_kernels import Softmax
from sglang_sparse_kernels.cascade import (
    AttentionAverage,
    CascadeBatch,
    CascadeShape,
    append_tokens,
    cascade_attention,
    close_strides,
    make_cascade_state,
    make_cascade_workspace,
    stride_kernel,
)
from sglang_sparse_kernels.common import Impl

HEADS, GROUP, DIM = 8, 4, 128
PROMPT = CascadeShape(16384, 64, 4, 4096)
DECODE = CascadeShape(4096, 64, 4, 1024)
ROWS = 16
# (rows of queries, keys, stages, warps)
TILES = [(128, 128, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 3, 8), (64, 64, 3, 4)]
# Off by the rounding of probabilities and outputs to bf16, a few times over.
MOST_ERROR = 2.0**-6


class Case:
    """Requests whose window is full, and new tokens of each."""

    def __init__(self, shape: CascadeShape, rows: int, new: int, held: int) -> None:
        """``held``: tokens of each request, the new ones included, at most ``shape.rows``."""
        self.shape, self.new, self.held = shape, new, held
        self.state = make_cascade_state(
            shape, layers=1, slots=rows, kv_heads=HEADS, dim=DIM, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        for tensor in (self.state.k, self.state.v):
            tensor.normal_()
        self.state.scores.uniform_()
        made = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.q = made(rows * new, HEADS * GROUP, DIM)
        self.k, self.v = made(rows * new, HEADS, DIM), made(rows * new, HEADS, DIM)
        columns = partial(torch.tensor, dtype=torch.int32, device="cuda")
        first = columns([i * new for i in range(rows + 1)])
        self.batch = CascadeBatch(columns(list(range(rows))), columns([held] * rows), first, new)
        speed = 500_000.0 ** (-torch.arange(0, DIM, 2, device="cuda").double() / DIM)
        angle = torch.arange(shape.rows, device="cuda")[:, None] * speed
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1).float()
        self.workspace = make_cascade_workspace(
            self.state, max_rows=rows, num_heads=HEADS * GROUP, close_rows=rows
        )
        self.out = torch.empty_like(self.q)

    def append(self) -> None:
        """Store the new tokens."""
        append_tokens(self.k, self.v, self.state, self.batch, impl="triton")

    def attend(self, impl: Impl = "triton") -> None:
        """Attend, and bring scores up to date."""
        cascade_attention(
            self.q, self.state, self.batch, self.cos_sin, softmax=Softmax(DIM**-0.5),
            average=AttentionAverage(0.9999), out=self.out, workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def close(self) -> None:
        """Evict; what is kept is valid whatever it was."""
        full = torch.full_like(self.batch.seq_lens, self.shape.rows)
        close_strides(self.state, self.batch.slots, full, workspace=self.workspace, impl="triton")

    def check(self) -> dict[str, float]:
        """Relative errors of output and scores against the definition.

        Raises:
            AssertionError: one is wrong.
        """
        self.append()
        before = self.state.scores.clone()
        self.attend("torch")
        out, scores = self.out.float(), self.state.scores.clone()
        self.state.scores.copy_(before)
        self.out.fill_(float("nan"))
        self.attend()
        found = {
            "out": float((self.out.float() - out).norm() / out.norm()),
            "scores": float((self.state.scores - scores).norm() / (scores - before).norm()),
        }
        assert all(error < MOST_ERROR for error in found.values()), found
        return found

    def pairs(self) -> float:
        """Pairs of a query head and a key that it sees."""
        seen = self.new * (self.held - self.new) + self.new * (self.new + 1) / 2
        return seen * HEADS * GROUP * self.batch.num_rows

    def fa3_us(self) -> float:
        """Microseconds of FlashInfer's attention of the first request, with its log-sum-exp."""
        from flashinfer import single_prefill_with_kv_cache

        k, v = (x[0, 0, :, : self.held] for x in (self.state.k, self.state.v))

        def call() -> None:
            single_prefill_with_kv_cache(
                self.q, k, v, causal=True, kv_layout="HND", backend="fa3", return_lse=True
            )

        return milliseconds(call, 5)


def bench_prompt(tiles: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """A stride behind a full window: both kernels with each tile, then what is launched beside."""
    case = Case(PROMPT, 1, PROMPT.stride, PROMPT.rows)
    rows: list[dict[str, Any]] = [{"name": "prompt, errors", **case.check()}]
    flops = {"cascade_stride_kernel": 4 * DIM, "cascade_mass_kernel": 2 * DIM}
    for tile in tiles:
        stride_kernel.ATTEND_TILE = stride_kernel.MASS_TILE = tile
        try:
            case.attend()
            found = launches([case.attend] * 3)
        except Exception as error:  # a tile that does not fit is told, and the others go on
            rows.append({"name": "prompt", "tile": tile, "error": str(error)[:200]})
            continue
        for one in found:
            work = flops.get(str(one["name"]), 0) * case.pairs()
            rate = work / float(one["us"]) * 1e-6
            rows.append({"kernel": one["name"], "tile": tile, "us": one["us"], "tflops": rate})
    for name, call in {"append": case.append, "close": case.close}.items():
        call()
        rows.append({"name": f"prompt, {name}", "us": milliseconds(call, 5)})
    try:
        us = case.fa3_us()
        rows.append({"name": "fa3", "us": us, "tflops": 4 * DIM * case.pairs() / us * 1e-6})
    except Exception as error:  # FlashInfer may have to compile it, and cannot everywhere
        rows.append({"name": "fa3", "error": str(error)[:200]})
    return rows


def bench_decode() -> list[dict[str, Any]]:
    """A step of a batch, of which half a stride is open."""
    case = Case(DECODE, ROWS, 1, DECODE.full + DECODE.stride // 2)
    rows: list[dict[str, Any]] = [{"name": "decode, errors", **case.check()}]
    moved = case.held * ROWS * HEADS * (4 * DIM + 8)
    for name, call in {"append": case.append, "attend": case.attend}.items():
        # A layer of 16 rows is several times what the L2 cache holds.
        times = time_calls([call] * 8, 20)
        rows.append({"name": f"decode, {name}", "must_move_bytes": moved} | times)
    case.close()
    rows.append({"name": "decode, close of all rows", "us": milliseconds(case.close, 5)})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true", help="time other tiles, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": []}
    tiles = TILES if args.tiles else [stride_kernel.ATTEND_TILE]
    for measure in (partial(bench_prompt, tiles), bench_decode):
        for row in measure():
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
