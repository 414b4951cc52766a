# SPDX-License-Identifier: Apache-2.0
"""Streaming heads that hold sinks and windows read what an oracle reads that keeps everything."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import initialize, precondition, rule
from radix_parts import configurator_of, tiny_model_config
from schedule_machine import RARELY, Schedules, run_schedules, run_until_seen
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_capacity import FREE_BYTES, PAGE, SHAPE, sizing_of
from window_harness import WindowSide

from sglang_sparse import compat
from sglang_sparse.compat import windows
from sglang_sparse.config import ConfigError, resolve_with_source
from sglang_sparse.config.model import Geometry
from sglang_sparse.launch import SparseLaunch, attach
from sglang_sparse.window_pools import create_configurator, tokens_of_one_request
from sglang_sparse_radix.branches import SparseFrom


@pytest.fixture(autouse=True)
def windows_move_each_step() -> Iterator[None]:
    """SGLang gives back what left a window every 128 steps otherwise."""
    with envs.SGLANG_SWA_EVICTION_INTERVAL.override(1):
        yield


class WindowSchedules(Schedules):
    """Any order of what a scheduler does, over two pools."""

    start = None  # type: ignore[assignment]
    side: WindowSide

    @initialize(
        page_size=st.sampled_from((16, 32)),
        num_pages=st.integers(12, 30),
        window_pages=st.integers(9, 16),
        sink_pages=st.integers(0, 2),
        local_pages=st.integers(1, 2),
        seed=st.integers(0, 2**16),
        decode=st.sampled_from((0, 15, 30)),
    )
    def start_windows(
        self, page_size, num_pages, window_pages, sink_pages, local_pages, seed, decode
    ):
        self.side = WindowSide(
            self.model_config,
            page_size=page_size,
            num_pages=num_pages,
            window_pages=window_pages,
            sink=sink_pages * page_size,
            local=local_pages * page_size,
            seed=seed,
        )
        self.modes = [SparseFrom(None, decode, budget) for budget in (128, 256, 512)]
        self.history = []
        self.forwards = 9  # flushes are allowed from the start

    evict = None  # type: ignore[assignment]

    @precondition(lambda self: self.side.tree.full_evictable_size() > 0)
    @rule(tokens=st.integers(0, 100), window_tokens=st.integers(1, 200), really=RARELY)
    def evict_both(self, tokens, window_tokens, really):
        if really:
            before = self.side.tree.swa_evictable_size()
            self.side.tree.evict(EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens))
            freed = before - self.side.tree.swa_evictable_size()
            assert freed >= min(window_tokens, before), "what is evictable was not given back"

    def teardown(self):
        if hasattr(self, "side"):
            self.seen.update(self.side.seen)


HARD = (
    "tombstone",
    "shortened match",
    "past given back",
    "reused tokens",
    "retraction for want of memory",
    "chunk that ends inside a page",
)


def test_streaming_heads_read_what_an_oracle_reads_that_keeps_everything(model_config):
    machine = type("Machine", (WindowSchedules,), {"model_config": model_config})
    run_until_seen(machine, HARD, examples=50)


def gives_back_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        windows.WindowRadixCache, "match_prefix", windows.UnifiedRadixCache.match_prefix
    )


def lets_sinks_become_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows.SinkWindowComponent, "_holds_sinks", lambda self, node: False)


def locks_no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows.SinkWindowComponent, "_count_lock", lambda *_: None)


def holds_half_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made = windows.SinkWindowComponent.__init__

    def halved(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.sliding_window_size //= 2

    monkeypatch.setattr(windows.SinkWindowComponent, "__init__", halved)


def keeps_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        windows.SinkWindowComponent,
        "prepare_for_caching_req",
        windows.SWAComponent.prepare_for_caching_req,
    )


@pytest.mark.parametrize(
    "mutate",
    [
        gives_back_sinks,
        lets_sinks_become_tombstones,
        locks_no_sinks,
        holds_half_a_window,
        keeps_what_was_decoded,
    ],
)
def test_the_oracle_finds_a_rule_that_is_broken(model_config, monkeypatch, mutate):
    mutate(monkeypatch)
    machine = type("Machine", (WindowSchedules,), {"model_config": model_config})
    with pytest.raises((AssertionError, RuntimeError, StopIteration, ExceptionGroup)):
        run_schedules(machine, examples=400, shrink=False)


Sizes = Callable[[dict[str, object] | None], Any]
WINDOWS = {
    "layers": {"kind": "every"},
    "heads": {"kind": "streaming", "sink": 128, "local": 1024, "streaming": [[0, 2, 5, 7]] * 32},
    "min_sparse_tokens": 1024,
}


@pytest.fixture
def sizes_of(tmp_path: Path) -> Sizes:
    """SGLang's sizes of the pools of an 8B model, by ``retention``; None for a dense server."""
    model = tiny_model_config(tmp_path, **SHAPE)
    geometry = Geometry.from_hf_config(model.hf_config.to_dict(), name="8b")

    def sizes(retention: dict[str, object] | None, dtype: torch.dtype = torch.bfloat16) -> Any:
        with configurator_of(model, PAGE, dtype) as kvc:
            if retention is not None:
                change = json.dumps(WINDOWS | {"retention": retention})
                resolved = resolve_with_source("page_minmax", change, geometry)
                attach(kvc.server_args, SparseLaunch(resolved))
            sizing = create_configurator(sizing_of, kvc)
            return sizing.calculate_pool_sizes(FREE_BYTES, PAGE)

    return sizes


@pytest.mark.parametrize("share", [0.03125, 0.25])
def test_half_of_the_heads_holding_windows_hold_nearly_twice_the_tokens(
    sizes_of: Sizes, share: float
) -> None:
    whole = sizes_of({"kind": "all"})
    held = sizes_of({"kind": "streaming_window", "share": share})
    # K, V and bounds of pages take 4.25 bytes a channel of a head that selects, 4 of one that
    # streams.
    times = 8 * 4.25 / (4 * 4.25 + 4 * 4 * share)
    assert held.max_total_num_tokens == pytest.approx(
        times * whole.max_total_num_tokens, abs=3 * PAGE
    )
    assert held.full_max_total_num_tokens == held.max_total_num_tokens
    assert held.swa_max_total_num_tokens == pytest.approx(
        share * held.max_total_num_tokens, abs=PAGE
    )
    # Sinks, three windows, a step's delay and two pages; or a chunk of 4,096 in place of the last.
    need = 6400 if compat.current().WAITS_FOR_WHOLE_CHUNKS else 3329
    with pytest.raises(ConfigError, match=f"a share that holds {need} tokens"):
        sizes_of({"kind": "streaming_window", "share": 1e-3})


def test_a_checkpoint_that_makes_auto_fp8_is_refused(sizes_of: Sizes) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype auto: .*fp8_e4m3, .*bfloat16$"):
        sizes_of({"kind": "streaming_window"}, torch.float8_e4m3fn)


def test_a_dense_server_holds_little_more_than_half_as_much(sizes_of: Sizes) -> None:
    dense = sizes_of(None).max_total_num_tokens
    # A dense server holds 4 bytes a channel of each of the 8 heads, and no bounds.
    assert dense == pytest.approx(FREE_BYTES / (32 * 8 * 128 * 4), abs=PAGE)
    held = sizes_of({"kind": "streaming_window"})
    assert held.max_total_num_tokens >= 1.8 * dense
    # Requests of 120K fit as often, each with the windows that one request may hold.
    requests = held.max_total_num_tokens // 120_000
    assert requests >= 1.8 * (dense // 120_000)
    assert held.swa_max_total_num_tokens >= requests * tokens_of_one_request((128, 1024), PAGE)
