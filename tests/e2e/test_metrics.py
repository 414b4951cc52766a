# SPDX-License-Identifier: Apache-2.0
"""What ``/metrics`` and ``/server_info`` say of a scripted run, beside counts made by hand."""

import json
import re
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from sglang_sparse.metrics import COUNTERS, PREFIX

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

DASHBOARD = Path(__file__).parents[2] / "loadtest" / "monitoring" / "sglang-sparse-dashboard.json"
TOKENS, BUDGET = 8, 256
SELECTING, LAYERS = 5, 6


@dataclass(frozen=True)
class Setting:
    """What of a server's configuration the counts depend on; lengths in tokens."""

    min_sparse: int
    every: int
    refresh: int
    unit: int
    page: int


SETTINGS = {
    "page_minmax": Setting(min_sparse=512, every=1, refresh=1, unit=16, page=64),
    "sparcas-kept": Setting(min_sparse=64, every=4, refresh=64, unit=1, page=32),
}


@pytest.fixture(scope="module")
def live(server: Callable[[str], LiveServer]) -> LiveServer:
    """A server with metrics."""
    return server("page_minmax")


def expected(
    setting: Setting, requests: list[tuple[int, int | None]]
) -> dict[tuple[str, str], int]:
    """Counts by hand, one token at a time.

    Args:
        setting: of the server.
        requests: (prompt tokens, budget) of each; None for a request that asked to be dense.
    """
    rows = dense = visible = attended = units = selections = refreshes = 0
    for prompt, budget in requests:
        first_sparse = max(setting.min_sparse, prompt + 1)
        # The first token comes out of the prefill.
        for length in range(prompt + 1, prompt + TOKENS):
            rows += 1
            visible += length
            if budget is None or length < first_sparse:
                dense += 1
                attended += length
                continue
            steps = length - first_sparse
            phase = steps % setting.every
            tail = length - 1 - phase
            unit = setting.unit
            there = -(-tail // unit)
            kept = min(-(-budget // unit), there)
            # The newest unit is always kept, whole or not.
            attended += sum(min(unit, tail - u * unit) for u in range(there - kept, there))
            attended += length - tail
            units += kept
            selections += phase == 0
            refreshes += steps % setting.refresh == 0
    dense_layers = LAYERS - SELECTING
    return {
        ("decode_rows_total", ""): rows,
        ("dense_fallback_rows_total", ""): dense,
        ("kv_tokens_total", "select"): visible * SELECTING,
        ("kv_tokens_total", "dense"): visible * dense_layers,
        ("kv_tokens_attended_total", "select"): attended * SELECTING,
        ("kv_tokens_attended_total", "dense"): visible * dense_layers,
        ("selected_units_total", str(setting.unit)): units,
        ("selections_total", ""): selections,
        ("selection_refreshes_total", ""): refreshes,
        ("cap_hits_total", ""): 0,
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_metrics_of_a_scripted_run_are_the_counts_made_by_hand(
    server: Callable[[str], LiveServer], prompts: list[list[int]], name: str
) -> None:
    live, setting = server(name), SETTINGS[name]
    live.flush()
    before = live.metrics()
    ids = [prompts[0][:400], prompts[5], prompts[10], prompts[9]]
    budgets: list[int | None] = [BUDGET, 128, BUDGET, None]
    asked: list[dict[str, Any]] = [{}, {"budget": 128}, {}, {"mode": "dense"}]
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {
        "input_ids": ids,
        "sampling_params": [sampling | {"custom_params": {"sparse": a}} for a in asked],
    }
    cached = 0
    for _ in range(2):  # the second time over shared prefixes
        answers = live.call("/generate", body)
        cached += sum(a["meta_info"]["cached_tokens"] for a in answers)
    after = live.metrics()
    changes = {key: after[key] - before.get(key, 0) for key in after}
    lengths = [len(p) for p in ids]
    for key, count in expected(setting, list(zip(lengths, budgets, strict=True)) * 2).items():
        assert changes[key] == count, key
    assert cached > 4000
    assert changes["plane_reuse_tokens_total", ""] == cached
    assert changes["plane_reuse_pages_total", ""] * setting.page == cached
    assert 4 <= changes["plane_reuse_prefills_total", ""] <= 8
    assert changes["decode_steps_total", "sparse"] >= 2 * (TOKENS - 1)
    # One publication, at least, whose mean share is that of the run.
    share = changes["kv_share_sum", "select"] / changes["kv_share_count", "select"]
    assert 0 < share < 1
    assert changes["kv_share_count", "dense"] == changes["kv_share_sum", "dense"]


def test_server_info_says_what_runs(live: LiveServer) -> None:
    state = live.sparse_state()
    assert state["method"] == "page_minmax"
    assert list(state["axes"]) == [
        "layers", "heads", "score", "budget", "cadence", "prefill", "retention", "placement"
    ]  # fmt: skip
    assert re.fullmatch("[0-9a-f]{12}", state["preset_hash"])
    assert state["layers"] == {"dense": [0], "select": [1, 2, 3, 4, 5]}
    assert state["request_budget"]["most"] == 32768
    assert state["request_budget"]["unit"] == "tokens"
    assert state["graphs"]["decode"] in ("captured", "off")
    gauges = live.metrics()
    for plane, size in state["plane_bytes"].items():
        assert size > 0
        assert gauges["plane_bytes", plane] == size


def test_the_dashboard_reads_metrics_that_the_server_has(live: LiveServer) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    # What SGLang's monitoring provisions beside its own: another uid and title, the same variables.
    assert (dashboard["uid"], dashboard["title"]) == ("sglang-sparse", "SGLang sparse attention")
    assert "id" not in dashboard
    variables = dashboard["templating"]["list"]
    assert [v["name"] for v in variables] == ["datasource", "instance", "model_name"]
    assert variables[0] | {"type": "datasource", "query": "prometheus"} == variables[0]
    # SGLang has its time per token only once an answer came in pieces.
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    live.call("/generate", {"text": "The", "sampling_params": sampling, "stream": True})
    text = live.call("/metrics")
    served = {line.split("{")[0] for line in text.splitlines() if line[:1] not in ("#", "")}
    # Those of a budget of mass, and of KV in host memory, are on servers that have it; other tests
    # read them.
    others = ("mass_", "frame_", "prompt_")
    served |= {f"{PREFIX}{name}_total" for name in COUNTERS if name.startswith(others)}
    panels = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            names = re.findall(r"sglang(?:_sparse)?:[a-z_]+", target["expr"])
            assert names
            assert set(names) <= served, panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used - {"__rate_interval"} == {"instance", "model_name"}
            assert target["datasource"]["uid"] == "${datasource}"


def test_metrics_are_off_unless_asked_for(server: Callable[[str], LiveServer]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server("sparcas").call("/metrics")
