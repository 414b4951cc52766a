# SPDX-License-Identifier: Apache-2.0
"""``sglang.Engine`` served sparsely, and the clients that measure latency."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import MODEL, LiveServer, server_environment
from machine import HAS_GPU

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import alternate_latency  # isort: skip
import decode_latency  # isort: skip

from sglang_sparse.tasks import TaskSuite

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ENGINE_SCRIPT = """
import json, sys
import sglang

def main():
    request = json.load(sys.stdin)
    try:
        sglang.Engine(**request["engine"] | {"sparse_method": "nonsense"})
        start = "started"
    except ValueError as error:
        start = str(error)
    engine = sglang.Engine(**request["engine"])
    sampling = {"temperature": 0, "max_new_tokens": 24}
    answers = [engine.generate(prompt, sampling)["text"] for prompt in request["prompts"]]
    state = engine.get_server_info()["internal_states"][0]["sparse"]
    asked = sampling | {"custom_params": {"sparse": {"mode": "dense"}}}
    dense = [engine.generate(prompt, asked)["text"] for prompt in request["prompts"]]
    after = engine.get_server_info()["internal_states"][0]["sparse"]["decode_steps"]
    try:
        engine.generate("The", {"custom_params": {"sparse": {"budget": 1}}})
        refusal = None
    except ValueError as error:
        refusal = str(error)
    engine.shutdown()
    result = [answers, state["method"], state["decode_steps"], dense, after, refusal, start]
    print("RESULT" + json.dumps(result))

if __name__ == "__main__":
    main()
"""


def run_python(script: str, stdin: str = "") -> str:
    """Standard output of a Python program that starts its own processes."""
    # Spawned schedulers import the main module again, so it has to be a file, whose folder is
    # searched for modules: one that holds no others.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(script)
        done = subprocess.run(
            [sys.executable, path],
            input=stdin,
            capture_output=True,
            text=True,
            env=server_environment({}),
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_engine_decodes_sparsely(suite: TaskSuite) -> None:
    samples = suite.samples("passkey", length=1500, count=2, seed=11)
    engine = {
        "model_path": str(MODEL),
        "attention_backend": "sparse",
        "sparse_method": "sparcas",
        "sparse_config": json.dumps({"min_sparse_tokens": 64}),
        "max_total_tokens": 16384,
        "max_running_requests": 4,
    }
    if not HAS_GPU:
        engine |= {"device": "cpu", "disable_overlap_schedule": True, "dtype": "float32"}
    request = {"engine": engine, "prompts": [s.prompt for s in samples]}
    output = run_python(ENGINE_SCRIPT, json.dumps(request))
    texts, method, steps, dense, after, refusal, start = json.loads(output.rsplit("RESULT", 1)[1])
    assert method == "sparcas"
    assert steps["sparse"] > 0
    for text, sample in zip([*texts, *dense], [*samples, *samples], strict=True):
        assert all(value in text for value in sample.values)
    # What a request asks for comes through the engine too.
    assert after["sparse"] == steps["sparse"]
    assert after["dense"] > steps["dense"]
    assert "custom_params.sparse.budget 1" in refusal
    assert "allowed: " in refusal
    # A bad start is an exception, not the end of the program.
    assert "--sparse-method nonsense" in start


def test_the_latency_client_measures_a_running_server(
    server: Callable[[str], LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, out = server("sparcas"), tmp_path / "latency.json"
    monkeypatch.setattr(decode_latency, "LONG", 64)
    line = ["decode_latency.py", "--base-url", live.url, "--label", "sparcas", "--out", str(out)]
    line += ["--contexts", "300", "--batches", "2", "--separate", "200x2", "--vocab", "1000"]
    monkeypatch.setattr(sys, "argv", [*line, "--repeats", "1"])
    decode_latency.main()
    report = json.loads(out.read_text())
    assert [(c["context"], c["batch"], c["shared_prompt"]) for c in report["cells"]] == [
        (300, 2, True),
        (200, 2, False),
    ]
    assert all(cell["ms_per_token"] > 0 for cell in report["cells"])
    assert report["cells"][0]["cached_tokens"] >= 256
    assert report["sparse"]["method"] == "sparcas"


def test_servers_are_measured_in_turns(server: Callable[[str], LiveServer]) -> None:
    servers = {name: server(name).url for name in ("dense", "sparcas")}
    cell = alternate_latency.alternate(servers, 300, 2, tokens=(2, 6), repeats=3, vocab=1000)
    assert cell["servers"]["dense"]["ratio"] == 1
    for found in cell["servers"].values():
        assert len(found["all_ms_per_token"]) == 3
        low, high = found["ratio_quartiles"]
        assert low <= found["ratio"] <= high
