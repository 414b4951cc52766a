# SPDX-License-Identifier: Apache-2.0
"""Programs of a few layers over a real pool of random keys, without a server."""

from typing import Any

import torch

from sglang_sparse.backend.allocate import allocate
from sglang_sparse.backend.heads import Heads
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels import DecodePlan, KVScales, Softmax, StepContext, decode_step
from sglang_sparse_kernels.common import Impl
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

LAYERS, GROUP, DIM, PAGE = 3, 2, 64, 64
CPU = torch.device("cpu")


class LayerPrograms:
    """Three layers of a config, and a decode step of two requests in which both select anew.

    Attributes:
        pool: with random keys and values, its planes up to date.
        plan: the step's.
        build, programs, budget: what a server makes of the config.
        q: float32 [layers, rows, heads * group, dim], random.
    """

    def __init__(
        self, config: SparseConfig, lengths: tuple[int, int], heads: int, *, seed: int, impl: Impl
    ) -> None:
        self.config, self.lengths, self.heads, self.impl = config, lengths, heads, impl
        random = torch.Generator().manual_seed(seed)
        pages = [-(-length // PAGE) for length in lengths]
        spec = PlaneSpec((*config.score.planes(), *config.budget.planes(config.score)))
        self.pool: Any = bind_pool_class(spec, "torch")(
            (sum(pages) + 1) * PAGE, page_size=PAGE, dtype=torch.float32, head_num=heads,
            head_dim=DIM, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
            start_layer=0, end_layer=LAYERS,
        )  # fmt: skip
        for rows in (*self.pool.k_buffer, *self.pool.v_buffer):
            rows.copy_(torch.randn(rows.shape, generator=random))
        self.plan = plan = DecodePlan.allocate(len(lengths), max(pages))
        plan.page_table[0, : pages[0]] = 1 + torch.arange(pages[0])
        plan.page_table[1, : pages[1]] = 1 + pages[0] + torch.arange(pages[1])
        plan.seq_lens.copy_(torch.tensor(lengths))
        plan.tail_start.copy_(plan.seq_lens - 1)
        plan.request_slots.copy_(torch.tensor([2, 1]))
        columns = Columns(3, CPU)
        RequestTable(config, columns)
        self.build = build = allocate(
            config, self.pool, Heads(heads * GROUP, heads, DIM), columns,
            max_context=max(lengths), impl=impl,
        )  # fmt: skip
        capacity = torch.tensor(build.limits.capacity_units)
        plan.k_units.copy_(torch.minimum(capacity, -(-plan.tail_start // config.unit)))
        plan.reselect.fill_(1)
        plan.refresh.fill_(1)
        self.pool.update_planes(
            plan.page_table, torch.zeros_like(plan.seq_lens), plan.seq_lens,
            max_new_tokens=max(lengths),
        )  # fmt: skip
        score, self.budget = config.score.build(build), config.budget.build(build, config.score)
        self.programs = compile_programs(config, build, score, self.budget)
        self.budget.plan(plan.request_slots.long())
        self.q = torch.randn((LAYERS, len(lengths), heads * GROUP, DIM), generator=random)

    def run(self, layer: int) -> torch.Tensor:
        """Attention output of one layer, [rows, heads, group, dim]."""
        program, q = self.programs[layer], self.q[layer]
        out = torch.full_like(q, torch.nan)
        step = StepContext(
            q=q, kv=program.kv(self.plan.page_table, PAGE, KVScales()), plan=self.plan,
            lists=program.read(self.build.lists.rows_of(self.plan), self.config.unit),
            softmax=Softmax(DIM**-0.5), out=out, impl=self.impl,
        )  # fmt: skip
        decode_step(program.stages, step)
        return out.view(len(self.lengths), self.heads, GROUP, DIM)
