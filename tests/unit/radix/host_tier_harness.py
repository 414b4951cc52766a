# SPDX-License-Identifier: Apache-2.0
"""`MemorySide` with SGLang's hierarchical cache: its tree, its controller, its host pool.

On a GPU a load runs beside the forward pass, and who does not wait reads what was there before.
Here a load is copied when it is waited for, layer by layer, and otherwise at the end of the pass,
so that a missing wait shows in the planes.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from invariants import tree_nodes
from radix_harness import MemorySide, RunForward
from radix_parts import LAYERS, scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import hiradix_cache
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.runtime_context import get_server_args

from sglang_sparse_radix.branches import Branch
from sglang_sparse_radix.host_pool import PlainHostPool

FORWARD_STREAM = torch.cpu.Stream()


class TransferStream(torch.cpu.Stream):
    """Knows which stream it was told to wait for."""

    waits_for: object = None

    def wait_stream(self, stream: object) -> None:
        """See `torch.cuda.Stream`."""
        self.waits_for = stream


class LateHostPool(PlainHostPool):
    """Copies a layer when it is waited for, and tells who owns what was copied.

    What goes to the host while a forward pass is in flight is copied at once, before the pass has
    written the last of it, unless the copy was told to wait for it.
    """

    late: list[list[Callable[[], None]]]
    moved: Callable[[list[int], list[int], bool], None]
    in_flight = False
    behind: list[Callable[[], None]]
    write_stream: TransferStream

    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend
    ):
        if layer_id == 0:
            self.moved(host_indices.tolist(), device_indices.tolist(), True)
        arguments = (device_pool, host_indices, device_indices, layer_id, io_backend)
        self.late[layer_id].append(lambda: PlainHostPool.load_to_device_per_layer(self, *arguments))

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
        def copy_now() -> None:
            self.moved(host_indices.tolist(), device_indices.tolist(), False)
            arguments = (device_pool, host_indices, device_indices, io_backend)
            PlainHostPool.backup_from_device_all_layer(self, *arguments)

        if self.in_flight and self.write_stream.waits_for is FORWARD_STREAM:
            self.behind.append(copy_now)
        else:
            copy_now()

    def land(self) -> None:
        """End the forward pass that is in flight."""
        self.in_flight, self.write_stream.waits_for = False, None
        while self.behind:
            self.behind.pop(0)()

    def copy_until(self, layer: int) -> None:
        """Copy what is waited for."""
        for copies in self.late[: layer + 1]:
            while copies:
                copies.pop(0)()


class HostTierSide(MemorySide):
    """Requests moving through pools, tree and host tier."""

    def __init__(self, model_config: Any, spec: Any, *, flags: dict[str, object], **sizes: Any):
        """`flags` are those of `--hicache-*`."""
        self.host_saw: dict[int, frozenset[object]] = {}
        server_args = copy.copy(get_server_args())
        flags = {"enable_hierarchical_cache": True, "hicache_storage_backend": None} | flags
        for name, value in flags.items():
            object.__setattr__(server_args, name, value)
        self.worker = SimpleNamespace(
            register_hicache_layer_transfer_counter=self._register,
            model_runner=SimpleNamespace(forward_stream=FORWARD_STREAM),
        )
        build = {"server_args": server_args, "enable_hierarchical_cache": True}
        build["tp_worker"] = self.worker
        original = hiradix_cache.get_mha_host_pool_cls
        hiradix_cache.get_mha_host_pool_cls = lambda pool: LateHostPool
        try:
            super().__init__(model_config, spec, build=build, **sizes)
        finally:
            hiradix_cache.get_mha_host_pool_cls = original
        self.host = self.tree.token_to_kv_pool_host
        self.host.late, self.host.moved = [[] for _ in range(LAYERS)], self._moved
        controller = self.tree.cache_controller
        controller.load_stream, controller.write_stream = TransferStream(), TransferStream()
        self.host.behind, self.host.write_stream = [], controller.write_stream
        self.allocator.debug_mode = True
        for name in ("load_back", "_evict_backuped", "evict_host", "_put_on_device"):
            self._count_calls(name)

    def _register(self, counter: Any) -> None:
        self.counter = counter
        waits = counter.wait_until

        def wait_until(layer: int) -> None:
            waits(layer)
            if counter.consumer_index >= 0:
                self.host.copy_until(layer)

        counter.wait_until = wait_until

    def _moved(self, host: list[int], device: list[int], to_device: bool) -> None:
        for there, here in zip(host, device, strict=True):
            if to_device:
                self.saw[here] = self.host_saw[there]
            else:
                self.host_saw[there] = self.saw[here]

    # -- what the scheduler does beside ------------------------------------------------------------

    def take_acknowledged(self) -> None:
        self.tree.check_hicache_events()

    def load_back(self, req: Req, batch_reqs: list[Req], budget: int) -> bool:
        """As `PrefillAdder.add_one_req` does it."""
        if not req.needs_host_load_back():
            return True
        self.tree.inc_lock_ref(locked := req.last_node)
        fits = self._fits_with(req, batch_reqs)
        if fits:
            slots, req.last_node = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            req.prefix_indices = torch.cat([req.prefix_indices, slots])
            req.cache_protected_len = len(req.prefix_indices)
        self.tree.dec_lock_ref(locked)
        # A chunk is whole pages; where none is left, the request waits, with its load asked for.
        rest = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        return fits and budget >= min(rest, self.page_size)

    def _fits_with(self, req: Req, batch_reqs: list[Req]) -> bool:
        """Whether there is room for all, what is loaded included."""
        need = len(req.full_untruncated_fill_ids) - len(req.prefix_indices) + self.page_size
        need += sum(
            scheduler.extend_end(r) - scheduler.prefix(r) + self.page_size for r in batch_reqs
        )
        return self.allocator.available_size() + self.tree.evictable_size() >= need

    def start_loading(self, batch: ScheduleBatch) -> None:
        queued = {op.node_ids[0] for op in self.tree.cache_controller.load_queue}
        held = {node.id for req in batch.reqs for node in path_of(req.last_node)}
        self.seen["a load that no request of the batch reads"] += bool(queued - held)
        batch.hicache_consumer_index = self.tree.ready_to_load_host_cache()

    def enter_forward(self, batch: ScheduleBatch, has_prefix: bool) -> None:
        """Attention of a layer waits for it, where there is a prefix to attend to."""
        self.counter.set_consumer(batch.hicache_consumer_index)
        for layer in range(LAYERS if has_prefix else 0):
            self.pool.get_key_buffer(layer)

    def launch(self, batch: ScheduleBatch, starts: list[int]) -> RunForward:
        """See `MemorySide`."""
        run = super().launch(batch, starts)
        self.host.in_flight = True

        def run_and_land() -> None:
            run()
            self.host.land()

        return run_and_land

    def prefill(self, chunk_tokens: int, *, overlap: bool = False) -> list[Req]:
        """See `MemorySide`; KV is put in the tree, and so copied to the host, once it is written.

        A load ends some time, whoever waits for it.
        """
        done = super().prefill(chunk_tokens)
        self.host.copy_until(LAYERS)
        return done

    def flush(self) -> None:
        """See `MemorySide`; SGLang refuses it while a load is under way."""
        if not self.tree.cache_controller.load_queue:
            super().flush()

    # -- what must hold ----------------------------------------------------------------------------

    def seen_by(self, node: Any) -> list[frozenset[object]]:
        return (
            super().seen_by(node)
            if self._is_loaded(node)
            else [self.host_saw[slot] for slot in node.host_value.tolist()]
        )

    def _is_loaded(self, node: Any) -> bool:
        return not node.evicted and not set(node.value.tolist()) & self._queued()

    def _queued(self) -> set[int]:
        queue = self.tree.cache_controller.load_queue
        return {slot for op in queue for slot in op.device_indices.tolist()}

    def loaded(self, pages: torch.Tensor) -> torch.Tensor:
        queued = self._queued()
        there = [page * self.page_size not in queued for page in pages.tolist()]
        return torch.tensor(there, dtype=torch.bool)

    def check(self) -> None:
        """See `MemorySide`; the tree's own check agrees, and no host slot is lost."""
        super().check()
        assert self.tree.check_planes()["wrong"] == 0
        nodes = tree_nodes(self.tree)
        self.seen["branch on the host"] += sum(
            node.evicted and isinstance(node.key.extra_key, Branch) for node in nodes
        )
        held = [slot for node in nodes if node.backuped for slot in node.host_value.tolist()]
        assert len(held) == len(set(held)), "two nodes own a host slot"
        assert len(held) + self.host.available_size() == self.host.size, "host slots lost"


def path_of(node: Any) -> list[Any]:
    """A node and those above it."""
    found = []
    while node is not None:
        found.append(node)
        node = node.parent
    return found
