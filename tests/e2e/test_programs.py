# SPDX-License-Identifier: Apache-2.0
"""``sglang.Engine`` and a frontend program with a fork, served sparsely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import MODEL, LiveServer, server_environment
from machine import HAS_GPU

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
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"sparse_program_{os.getpid()}.py")
    # Spawned schedulers import the main module again, so it has to be a file.
    with open(path, "w") as file:
        file.write(script)
    try:
        done = subprocess.run(
            [sys.executable, path],
            input=stdin,
            capture_output=True,
            text=True,
            env=server_environment({}),
            timeout=600,
            check=False,
        )
    finally:
        os.unlink(path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_engine_decodes_sparsely(suite: TaskSuite) -> None:
    samples = suite.samples("passkey", length=3000, count=2, seed=11)
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


def test_a_fork_shares_its_prefix_and_every_branch_answers(
    server: Callable[[str], LiveServer], suite: TaskSuite
) -> None:
    import sglang as sgl

    live = server("sparcas")
    live.flush()
    sample = suite.samples("multi_key", length=3000, count=1, seed=21)[0]
    document, _, question = sample.prompt.rpartition("\n")
    branches = [question, question, question]

    @sgl.function
    def ask(s, prefix, questions):  # type: ignore[no-untyped-def]
        s += prefix
        s.sync()  # the frontend computes a shared prefix once only if its text has arrived
        forks = s.fork(len(questions))
        for fork, text in zip(forks, questions, strict=True):
            fork += "\n" + text
            fork += sgl.gen("answer", max_tokens=24, temperature=0)
        s["answers"] = [fork["answer"] for fork in forks]
        s["cached"] = [fork.get_meta_info("answer")["cached_tokens"] for fork in forks]

    before = live.sparse_state()["decode_steps"]["sparse"]
    sgl.set_default_backend(sgl.RuntimeEndpoint(live.url))
    result = ask.run(prefix=document, questions=branches)
    for answer in result["answers"]:
        assert all(value in answer for value in sample.values)
    assert min(result["cached"]) >= 2880
    assert live.sparse_state()["decode_steps"]["sparse"] > before


def test_the_latency_client_measures_a_running_server(
    server: Callable[[str], LiveServer], tmp_path: Path
) -> None:
    live, out = server("sparcas"), tmp_path / "latency.json"
    script = Path(__file__).parents[2] / "loadtest" / "decode_latency.py"
    command = [sys.executable, str(script), "--base-url", live.url, "--label", "sparcas"]
    command += ["--contexts", "300", "--batches", "2", "--separate", "200x2", "--vocab", "1000"]
    subprocess.run([*command, "--repeats", "1", "--out", str(out)], check=True, timeout=300)
    report = json.loads(out.read_text())
    assert [(c["context"], c["batch"], c["shared_prompt"]) for c in report["cells"]] == [
        (300, 2, True),
        (200, 2, False),
    ]
    assert all(cell["ms_per_token"] > 0 for cell in report["cells"])
    assert report["cells"][0]["cached_tokens"] >= 256
    assert report["sparse"]["method"] == "sparcas"
