# SPDX-License-Identifier: Apache-2.0
"""The load tests against a real server: Locust, its page, capacity, the programs, a soak."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from live_server import LiveServer
from playwright.sync_api import expect, sync_playwright
from scripts import LOADTEST

import capacity  # isort: skip
import compare  # isort: skip
import local  # isort: skip
import short  # isort: skip
import soak  # isort: skip
from scenarios import Scenario  # isort: skip

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
PAGE = 64
KINDS = {"E2E", "TTFT", "TPOT", "TOK/S"}


@pytest.fixture(scope="module")
def live(server: Server) -> LiveServer:
    """A server with metrics, which can check its planes."""
    return server("page_minmax")


def test_locust_times_tokens_and_keeps_every_request(live: LiveServer, tmp_path: Path) -> None:
    # The documents that its users share; a slow machine gets to the first requests alone.
    capacity.warm(live.url, Scenario.load("bursts"))
    stats = short.summary(short.locust(live.url, "bursts", tmp_path, seconds=4))
    assert set(stats) == KINDS
    assert all(values["failed"] == 0 for values in stats.values())
    records = [json.loads(line) for line in (tmp_path / "bursts.jsonl").read_text().splitlines()]
    # Requests that were cut off at the end are in neither.
    assert len(records) >= 8
    assert {values["count"] for values in stats.values()} == {len(records)}
    for record in records:
        assert record["error"] is None
        assert 8 <= record["output_tokens"] <= 16
        assert 0 < record["first_token"] < record["total"]
        assert record["tokens_per_second"] == pytest.approx(
            record["output_tokens"] / record["total"]
        )
    # Two documents, shared by all.
    assert min(record["cached_tokens"] for record in records) > 300


def test_capacity_of_a_running_server_in_one_page(live: LiveServer, tmp_path: Path) -> None:
    scenario = {
        "name": "tiny", "about": "One short document.", "api": "generate", "documents": 1,
        "document": [700, 700], "question": [4, 8], "output": [12, 12],
    }  # fmt: skip
    (tmp_path / "scenario").mkdir()
    path = tmp_path / "scenario" / "tiny.json"
    path.write_text(json.dumps(scenario))
    command = [sys.executable, str(LOADTEST), "capacity", "--out", str(tmp_path)]
    command += ["--base-url", live.url, "--label", "tested", "--scenario", str(path)]
    command += ["--seconds", "2", "--drain", "5", "--least-rate", "1", "--most-rate", "4"]
    command += ["--limit", "16", "--burst", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "--limit-from is missing" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "tested.json").exists()
    # What a dense server's report says limits this one, whatever its own step is.
    dense = tmp_path / "limits" / "dense.json"
    dense.parent.mkdir()
    dense.write_text(json.dumps({"unloaded": {"step_s": 0.5}}))
    command += ["--limit-from", str(dense)]
    subprocess.run(command, check=True, timeout=300)
    report: dict[str, Any] = json.loads((tmp_path / "tested.json").read_text())
    assert report["sparse"]["method"] == "page_minmax"
    assert report["limits_s"] == {"strict": 2.5, "relaxed": 12.5}
    assert report["limits_from"] == "dense.json"
    assert 1 <= len(report["trials"]) <= 5
    assert set(report["capacity"]["strict"]) == {"met", "missed"}
    first = report["trials"][0]
    assert first["rate"] == 2
    assert first["done"] + first["unfinished"] == first["sent"] > 0
    assert first["failed"] == 0
    assert first["cached_tokens"] >= 640
    assert first["queued_p50_s"] >= 0
    assert first["gap_p99_s"] >= first["gap_p50_s"] > 0
    assert 0 < first["gaps"] <= 11 * first["sent"]
    # Two seconds carry no claim.
    assert first["verdicts"] == {"strict": "undecided", "relaxed": "undecided"}
    page = (tmp_path / "capacity.html").read_text()
    assert "One short document." in page
    assert page.count("<svg") == 1
    # Gone on with, the search begins where it was.
    subprocess.run([*command, "--resume"], check=True, timeout=300)
    again = json.loads((tmp_path / "tested.json").read_text())
    assert again["trials"][: len(report["trials"])] == report["trials"]
    assert again["unloaded"] == report["unloaded"]


def test_a_soak_leaves_planes_memory_and_server_as_they_should_be(live: LiveServer) -> None:
    outcome = soak.soak(local.Local(live.url, live.pid, live.log), seconds=8, seed=3, longest=700)
    assert outcome["ok"], {k: v for k, v in outcome.items() if k != "rss_mib"}
    # Which kinds a run this short gets to depends on the machine.
    assert sum(outcome["requests"].values()) >= 4
    assert outcome["decode_steps"]["sparse"] > 0


def test_a_soak_needs_a_server_that_compares_its_planes(server: Server) -> None:
    other = server("sparcas")
    with pytest.raises(ValueError, match="SGLANG_SPARSE_VERIFY=1"):
        soak.soak(local.Local(other.url, other.pid, other.log), seconds=600, seed=1)


def test_programs_share_prefixes_on_a_sparse_server_as_on_a_dense_one(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse, dense = server("sparcas"), server("dense")
    line = ["compare.py", "--repeats", "30", "--dense", dense.url, "--sparse", sparse.url]
    monkeypatch.setattr(sys, "argv", [*line, "--out", str(tmp_path / "out.json")])
    before = sparse.sparse_state()["decode_steps"]["sparse"]
    for live in (sparse, dense):
        live.flush()
    compare.main()
    assert sparse.sparse_state()["decode_steps"]["sparse"] > before
    found = json.loads((tmp_path / "out.json").read_text())
    fork, tree = found["fork_document"], found["tree_of_thought"]
    assert fork["calls"] == 6
    # The model misses one of them, dense as well as sparse.
    assert fork["dense"]["right"] == fork["sparse"]["right"] >= 5
    assert fork["same_answers"] == 6
    # A branch may find a page of another one's question, if that was faster.
    shared = [min(fork[kind]["cached_tokens"]) for kind in ("dense", "sparse")]
    assert min(shared) > 600
    assert abs(shared[0] - shared[1]) <= PAGE
    assert tree["calls"] == 7
    assert min(tree["sparse"]["cached_tokens"]) > 600


@pytest.fixture
def locust_page(live: LiveServer) -> Iterator[str]:
    """Locust with its web page, waiting for somebody to press start."""
    port = local.free_port()
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST / "locustfile.py")]
    command += ["--host", live.url, "--scenario", "shared_documents"]
    command += ["--web-host", "127.0.0.1", "--web-port", str(port)]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, "locust ended"
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_web_page_runs_a_test_in_a_browser(locust_page: str, tmp_path: Path) -> None:
    shot = tmp_path / "locust.png"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(locust_page)
        page.locator("input[name=userCount]").fill("2")
        page.locator("input[name=spawnRate]").fill("2")
        page.get_by_role("button", name="Start").first.click()
        for kind in sorted(KINDS):
            expect(page.get_by_role("cell", name=kind, exact=True).first).to_be_visible(
                timeout=60_000
            )
        page.screenshot(path=shot)
        browser.close()
    assert shot.read_bytes()[:4] == b"\x89PNG"
    assert shot.stat().st_size > 20_000, "the page is blank"
