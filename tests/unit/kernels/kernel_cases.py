# SPDX-License-Identifier: Apache-2.0
"""Random paged decode batches for the kernel tests, poisoned wherever a kernel must not read."""

import math
from dataclasses import dataclass

import torch

from sglang_sparse_kernels import (
    DENSE_REQUEST,
    DecodePlan,
    KeySketch,
    KVScales,
    KVView,
    Lists,
    PageCuboids,
    PlaneBuffers,
    PlaneShape,
    PlanRules,
    RequestState,
    Softmax,
    TokenTable,
    budget_row,
    plan_decode,
    update_planes,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
# Units, slots and channels that nobody may use: far outside of every tensor. Multiplied by up to
# 128 tokens of a page they must not become small ones in 32 bits.
FAR = 2**23
# What the definitions are tested as, what is tested against them, and all.
PYTORCH = ("torch", "cpu") if DEVICE.type == "cpu" else ("torch",)
FAST = (*PYTORCH[1:], "triton")
IMPLS = ("torch", *FAST)
UNSCALED = KVScales()


@dataclass
class Batch:
    """A paged decode batch: R rows over one pool, with a plan and, on demand, planes.

    K and V are stored in ``kv_dtype``, by default the queries' ``dtype``, and stand for themselves
    times ``scales``.
    """

    lengths: list[int]
    page_size: int = 64
    heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    unit: int = 1
    min_sparse: int = 48
    budget: int = 40
    capacity: int = 64
    reselect_every: int = 1
    refresh_every: int = 1
    shared_pages: int = 0
    dense_rows: tuple[int, ...] = ()
    seed: int = 0
    layers: int = 1
    kv_dtype: torch.dtype | None = None
    scales: KVScales = UNSCALED

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        page_counts = [-(-n // self.page_size) for n in self.lengths]
        self.num_pages = 3 + sum(page_counts)
        self.max_pages = max(page_counts) + 2
        free = (torch.randperm(self.num_pages - 1, generator=self.rng) + 1).tolist()
        shape = (self.num_pages * self.page_size, self.heads, self.dim)
        self.k = [torch.full(shape, NAN) for _ in range(self.layers)]
        self.v = [torch.full(shape, NAN) for _ in range(self.layers)]
        slots = self.max_pages * self.page_size
        # Stale entries of the token table point far outside the pool.
        self.req_to_token = torch.full((len(self.lengths) + 3, slots), FAR, dtype=torch.int32)
        self.req_to_token[0] = 0
        self.req_slots = torch.randperm(len(self.lengths) + 2, generator=self.rng)
        self.req_slots = self.req_slots[: len(self.lengths)] + 1
        common = [free.pop() for _ in range(self.shared_pages)]
        for row, length in enumerate(self.lengths):
            if length == 1:
                self.req_slots[row] = 0  # a padding row of a captured graph
                pages = [0]
            else:
                own = page_counts[row] - self.shared_pages
                pages = (common + [free.pop() for _ in range(max(own, 0))])[: page_counts[row]]
            table = torch.tensor(pages)[:, None] * self.page_size + torch.arange(self.page_size)
            self.req_to_token[self.req_slots[row], :length] = table.flatten()[:length].int()
            for buffer in (*self.k, *self.v):
                self._fill(buffer, table.flatten()[:length])
        for buffer in (*self.k, *self.v):
            self._fill(buffer, torch.arange(self.page_size))
        stored = self.kv_dtype or self.dtype
        self.k = [buffer.to(DEVICE, stored) for buffer in self.k]
        self.v = [buffer.to(DEVICE, stored) for buffer in self.v]
        self.k_ptrs = torch.tensor(
            [buffer.data_ptr() for buffer in self.k], dtype=torch.uint64, device=DEVICE
        )
        self.req_to_token = self.req_to_token.to(DEVICE)
        self.req_slots = self.req_slots.to(DEVICE)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int64, device=DEVICE)
        self.decode_start = torch.zeros(len(self.lengths) + 3, dtype=torch.int32, device=DEVICE)
        budget = torch.tensor([budget_row(self.budget, 0.0)], dtype=torch.int32, device=DEVICE)
        self.budgets = budget.repeat(len(self.lengths) + 3, 1)
        for row in self.dense_rows:
            self.decode_start[self.req_slots[row]] = DENSE_REQUEST
        # Rows of q lie apart, as they do in a fused qkv projection.
        query_heads = self.heads * self.group
        fused = torch.full((len(self.lengths), query_heads + 3, self.dim), NAN)
        fused[:, :query_heads] = self.randn(len(self.lengths), query_heads, self.dim)
        self.q = fused.to(DEVICE, self.dtype)[:, :query_heads]
        self.plan = self.make_plan("torch")

    def randn(self, *shape: int) -> torch.Tensor:
        """Seeded normal numbers, on the CPU."""
        return torch.randn(*shape, generator=self.rng)

    def _fill(self, buffer: torch.Tensor, slots: torch.Tensor) -> None:
        fresh = self.randn(len(slots), self.heads, self.dim)
        buffer[slots] = torch.where(buffer[slots].isnan(), fresh, buffer[slots])

    def make_plan(self, impl: str) -> DecodePlan:
        """A plan of this batch; page table entries that nobody defines are far out of range."""
        plan = DecodePlan.allocate(len(self.lengths) + 1, self.max_pages, DEVICE)
        plan.page_table.fill_(2**24)
        plan = plan.rows(len(self.lengths))
        self.fill_plan(plan, self.seq_lens, impl)
        return plan

    def fill_plan(self, plan: DecodePlan, seq_lens: torch.Tensor, impl: str) -> None:
        """Plan a step in which the rows are ``seq_lens`` long."""
        rules = PlanRules(
            self.page_size, self.unit, self.capacity, self.min_sparse, self.reselect_every,
            self.refresh_every,
        )  # fmt: skip
        tokens = TokenTable(self.req_to_token, self.req_slots, seq_lens)
        state = RequestState(self.decode_start, self.budgets)
        plan_decode(tokens, state, rules, plan=plan, impl=impl)

    @property
    def kv(self) -> KVView:
        """The first layer's KV rows, as the plan finds them."""
        return self.kv_of(0)

    def kv_of(self, layer: int) -> KVView:
        """A layer's KV rows, as the plan finds them."""
        table = self.plan.page_table
        return KVView(self.k[layer], self.v[layer], table, self.page_size, self.scales)

    @property
    def logit_scale(self) -> float:
        """Factor on a query times a key as it is stored."""
        return self.dim**-0.5 * self.scales.k

    def softmax(self, logit_cap: float = 0.0) -> Softmax:
        """The usual scale."""
        return Softmax(self.dim**-0.5, logit_cap)

    def lists(
        self,
        indices: torch.Tensor,
        counts: torch.Tensor,
        head_map: torch.Tensor | None = None,
    ) -> Lists:
        """Lists that are kept by request slot."""
        return Lists(indices, counts, self.plan.request_slots, self.unit, head_map)

    def sketch(self, planes: PlaneBuffers) -> KeySketch:
        """The first layer's sketch."""
        scale = planes.key_sketch_scale
        return KeySketch(planes.key_sketch[0], None if scale is None else scale[0], self.page_size)

    def cuboids(self, planes: PlaneBuffers) -> PageCuboids:
        """The first layer's page bounds."""
        return PageCuboids(planes.page_min[0], planes.page_max[0], self.unit, self.page_size)

    def make_planes(self, key_sketch: str | None, page_minmax: bool) -> PlaneBuffers:
        """Planes of every written position but the last of each row, NaN elsewhere."""
        planes = PlaneBuffers.allocate(
            PlaneShape(
                self.layers, self.num_pages, self.page_size, self.heads, self.dim, self.k[0].dtype
            ),
            page_minmax=page_minmax,
            key_sketch=key_sketch,
            logical_page=max(self.unit, 16),
            device=DEVICE,
        )
        poison(planes)
        end = self.plan.update_start.clone()
        update_planes(
            self.k,
            None,
            planes,
            self.plan.page_table,
            torch.zeros_like(end),
            end,
            page_size=self.page_size,
            max_new_tokens=max(self.lengths),
            impl="torch",
        )
        return planes

    @property
    def list_rows(self) -> int:
        """Rows that state tensors (lists, channels) need."""
        return len(self.lengths) + 3

    def random_lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ascending lists of k_units random units per head; entries past a count are poison."""
        shape = (self.list_rows, self.heads, self.capacity)
        indices = torch.full(shape, FAR, dtype=torch.int32)
        counts = torch.full(shape[:2], 2**20, dtype=torch.int32)
        plan = self.plan
        for row in range(len(self.lengths)):
            units = -(-int(plan.tail_start[row]) // self.unit)
            kept, target = int(plan.k_units[row]), int(plan.request_slots[row])
            if kept:
                counts[target] = kept
                for head in range(self.heads):
                    chosen = torch.randperm(units, generator=self.rng)[:kept].sort().values
                    indices[target, head, :kept] = chosen.int()
        return indices.to(DEVICE), counts.to(DEVICE)


def random_kinds(batch: Batch) -> torch.Tensor:
    """int32 [H], at least one head of each kind where there are two."""
    kinds = torch.randint(2, (batch.heads,), generator=batch.rng, dtype=torch.int32)
    kinds[0] = 1 - kinds[-1] if batch.heads > 1 else kinds[0]
    return kinds.to(DEVICE)


class Guarded:
    """Tensors that lie between guard zones, which nobody may write."""

    ZONE = 4096

    def __init__(self) -> None:
        self._whole: list[tuple[torch.Tensor, float]] = []

    def full(self, shape: tuple[int, ...], fill: float, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``fill`` with a zone of the same value on both sides."""
        size = math.prod(shape)
        whole = torch.full((size + 2 * self.ZONE,), fill, dtype=dtype, device=DEVICE)
        self._whole.append((whole, fill))
        return whole[self.ZONE : self.ZONE + size].view(shape)

    def check(self) -> None:
        """Fail if a guard zone was written."""
        for whole, fill in self._whole:
            for zone in (whole[: self.ZONE], whole[-self.ZONE :]):
                assert (zone == fill).all()


def poison(planes: PlaneBuffers) -> None:
    """Fill every plane with NaN (integers: an arbitrary code)."""
    for plane in planes.tensors().values():
        if plane.dtype == torch.int8:
            plane.fill_(-128)
        elif plane.dtype == torch.uint8:
            plane.fill_(0x0F)
        elif plane.dtype == torch.float8_e4m3fn:
            plane.view(torch.uint8).fill_(0x7F)
        else:
            plane.fill_(NAN)
