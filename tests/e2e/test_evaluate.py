# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse eval` against a real server: the table, going on after an end, refusals."""

import csv
import json
import math
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_server import MODEL, LiveServer
from rounding import logprob_error
from typer.testing import CliRunner

from sglang_sparse.cli import app
from sglang_sparse.evaluate.arms import Arm, make_arms
from sglang_sparse.evaluate.client import Server
from sglang_sparse.evaluate.forcing import serialized
from sglang_sparse.research.export import load
from sglang_sparse.tasks import FileEncoder, TaskSuite

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LENGTH, DECODED, COUNT = 700, 16, 2
RUN = CliRunner()


@pytest.fixture(scope="module")
def live(server: Callable[[str], LiveServer]) -> LiveServer:
    """A server that can decode a given text."""
    return server("page_minmax")


def arguments(live: LiveServer, out: Path, **changes: str) -> list[str]:
    options = {
        "base-url": live.url,
        "out": str(out),
        "tasks": "passkey,multi_key",
        "budgets": "32768,128",
        "lengths": str(LENGTH),
        "count": str(COUNT),
        "text": str(ROOT / "LICENSE"),
        "decoded": str(DECODED),
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["eval", *(part for name, value in options.items() for part in (f"--{name}", value))]


def perplexity_of_the_model() -> float:
    """Of the same windows, by the model itself, whole and in fp32."""
    ids = FileEncoder(MODEL).encode((ROOT / "LICENSE").read_text())
    model, losses = load(MODEL).eval(), []
    step = len(ids) - LENGTH
    for start in (0, step):
        row = torch.tensor([ids[start : start + LENGTH]])
        with torch.no_grad():
            logits = model.logits(model(row))[0, :-1].float()
        # The first of the decoded tokens comes out of the prefill and does not count.
        last = DECODED - 1
        losses.append(float(F.cross_entropy(logits[-last:], row[0, -last:])))
    return math.exp(sum(losses) / len(losses))


def test_what_was_decoded_under_an_arm_is_no_prefix_of_a_longer_window(live: LiveServer) -> None:
    client = Server(live.url)
    ids = FileEncoder(MODEL).encode((ROOT / "LICENSE").read_text())
    arms, processor = make_arms(["128", "256"], client.state), serialized()

    def reused(end: int, decoded: int, arm: Arm) -> int:
        before = live.sparse_state()["plane_reuse"]["tokens"]
        client.forced_logprobs(ids[:end], ids[end : end + decoded], arm, processor)
        return int(live.sparse_state()["plane_reuse"]["tokens"] - before)

    live.flush()
    assert reused(640, 130, arms[1]) == 0
    # The next window goes on through what was decoded; its prompt is a prefill's, once for all.
    assert [reused(800, 2, arm) for arm in (*arms, arms[1])] == [0, 768, 768, 768]


def test_dense_and_budgets_from_one_server_in_one_table(live: LiveServer, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    before = live.sparse_state()["decode_steps"]["sparse"]
    done = RUN.invoke(app, arguments(live, out))
    assert done.exit_code == 0, done.output
    assert live.sparse_state()["decode_steps"]["sparse"] > before
    report: dict[str, Any] = json.loads((out / "results.json").read_text())
    cells = {(c["task"], c["arm"]): c for c in report["cells"]}
    assert {arm for _, arm in cells} == {"dense", "128", "32768"}
    assert {task for task, _ in cells} == {"passkey", "multi_key", "perplexity"}
    for (task, _), cell in cells.items():
        assert cell["count"] == COUNT
        assert cell["low"] <= cell["value"] <= cell["high"]
        assert task == "perplexity" or cell["value"] in (0, 0.5, 1)
    # Pages of 16 tokens are too coarse for 128 tokens at times.
    assert cells["passkey", "dense"]["value"] == cells["passkey", "32768"]["value"] == 1
    values = {arm: cells["perplexity", arm]["value"] for arm in ("dense", "128", "32768")}
    # A perplexity is the exponential of a mean of log-probabilities.
    rounding = math.expm1(logprob_error(LENGTH))
    assert values["dense"] == pytest.approx(perplexity_of_the_model(), rel=rounding)
    assert values["128"] != values["32768"], "it did not decode sparsely"
    # A budget of more than there is changes nothing.
    assert values["32768"] == pytest.approx(values["dense"], rel=rounding)
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(cells)
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"

    # A run that was ended goes on where it was, also after half a line.
    journal = out / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])
    asked = live.sparse_state()["plane_reuse"]["prefills"]
    assert RUN.invoke(app, arguments(live, out)).exit_code == 0
    assert live.sparse_state()["plane_reuse"]["prefills"] == asked + 2
    assert [json.loads(line)["task"] for line in journal.read_text().splitlines()]
    # Then there is nothing left to ask.
    assert RUN.invoke(app, arguments(live, out)).exit_code == 0
    assert live.sparse_state()["plane_reuse"]["prefills"] == asked + 2
    again = json.loads((out / "results.json").read_text())
    assert [(c["task"], c["arm"], c["count"]) for c in again["cells"]] == [
        (c["task"], c["arm"], c["count"]) for c in report["cells"]
    ]


LM_EVAL_TASK = """
task: local_passkey
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{number}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: '(\\d+)'}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_an_lm_eval_task_runs_dense_and_sparse_without_a_network(
    live: LiveServer, suite: TaskSuite, tmp_path: Path
) -> None:
    # Longer than the 2048 tokens that lm-eval leaves of a prompt unless it is told otherwise, and
    # with the answer in what it would cut off.
    samples = suite.samples("passkey", length=2200, count=40, seed=5)
    early = [s for s in samples if s.needle_spans[0][1] < 150][:2]
    assert len(early) == 2
    data, task, out = tmp_path / "data.jsonl", tmp_path / "task.yaml", tmp_path / "eval"
    data.write_text(
        "".join(json.dumps({"prompt": s.prompt, "number": s.values[0]}) + "\n" for s in early)
    )
    task.write_text(LM_EVAL_TASK.format(data=data, cache=tmp_path / "cache"))
    asked = ["eval", "--base-url", live.url, "--out", str(out), "--tasks", ""]
    asked += ["--lm-eval", str(task), "--budgets", "256"]
    before = live.sparse_state()["decode_steps"]
    done = RUN.invoke(app, asked)
    assert done.exit_code == 0, done.output
    after = live.sparse_state()
    assert all(after["decode_steps"][kind] > before[kind] for kind in ("dense", "sparse"))
    cells = json.loads((out / "results.json").read_text())["cells"]
    name = "local_passkey exact_match,number"
    assert [(c["task"], c["arm"], c["count"]) for c in cells] == [
        (name, "dense", 2),
        (name, "256", 2),
    ]
    assert cells[0]["value"] == 1, "the prompt was cut"
    assert all(c["low"] <= c["value"] <= c["high"] and c["low"] < c["high"] for c in cells)
    assert (out / "accuracy.png").exists()
    # What was answered is not asked again; another budget is.
    assert RUN.invoke(app, asked).exit_code == 0
    assert live.sparse_state()["plane_reuse"]["prefills"] == after["plane_reuse"]["prefills"]
    done = RUN.invoke(app, [*asked[:-1], "256,32768"])
    assert done.exit_code == 0, done.output
    cells = json.loads((out / "results.json").read_text())["cells"]
    assert [c["arm"] for c in cells] == ["dense", "256", "32768"]
    assert cells[2]["value"] == 1


def test_a_missing_lm_eval_is_said_before_anything_is_asked(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = RUN.invoke(app, arguments(live, tmp_path / "eval", lm_eval="gsm8k"))
    assert done.exit_code == 2
    assert "pip install 'sglang-sparse[lm-eval]'" in done.output
    assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_eval": "/no/task.yaml"}, ["--lm-eval /no/task.yaml", "there is no such task"]),
        ({"base_url": "http://127.0.0.1:9"}, ["--base-url", "no SGLang server answered"]),
        ({"tasks": "passkeys"}, ["--tasks passkeys", "passkey"]),
        ({"budgets": "100000"}, ["--budgets 100000", "to 32768"]),
        ({"budgets": "many"}, ["--budgets many", "to 32768"]),
        ({"lengths": "12"}, ["--lengths 12", "256 to"]),
        ({"text": "/no/such/file"}, ["--text /no/such/file"]),
        ({"text": sys.executable}, ["--text", "cannot be read", "UTF-8"]),
        ({"tokenizer": "/nowhere"}, ["--tokenizer /nowhere", "tokenizer.json"]),
        ({"lengths": "32000"}, ["--text", "too few"]),
        ({"tasks": "", "text": "/dev/null"}, ["--text /dev/null"]),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    live: LiveServer, tmp_path: Path, change: dict[str, str], words: list[str]
) -> None:
    done = RUN.invoke(app, arguments(live, tmp_path / "eval", **change))
    assert done.exit_code == 2
    for word in words:
        assert word in done.output


def test_an_address_with_v1_and_nothing_to_ask_are_refused(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, words in (
        (["--base-url", f"{live.url}/v1"], ["--base-url", "answered 404", "without /v1"]),
        (["--base-url", live.url, "--tasks", ""], ["--tasks", "nothing to ask", "passkey"]),
    ):
        done = RUN.invoke(app, ["eval", *line])
        assert done.exit_code == 2
        for word in words:
            assert word in done.output
    assert not list(tmp_path.iterdir())


def test_a_server_that_ends_is_told_and_the_evaluation_goes_on_later(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "eval", urllib.request.urlopen
    changes = {"tasks": "passkey", "budgets": "128", "count": "1", "concurrency": "1"}
    changes |= {"lengths": "300", "decoded": "2"}
    chats = []

    def ends(request: urllib.request.Request, timeout: float) -> Any:
        chats.extend([1] * request.full_url.endswith("/chat/completions"))
        if len(chats) == 2:
            raise ConnectionResetError("the server is gone")
        return asked(request, timeout=timeout)

    with monkeypatch.context() as patched:
        patched.setattr(urllib.request, "urlopen", ends)
        done = RUN.invoke(app, arguments(live, out, **changes))
    assert done.exit_code == 2
    assert "the server is gone" in done.output
    assert "the same command goes on" in done.output
    assert len((out / "journal.jsonl").read_text().splitlines()) == 1
    assert RUN.invoke(app, arguments(live, out, **changes)).exit_code == 0
    # Two answers, two windows of the text.
    assert len((out / "journal.jsonl").read_text().splitlines()) == 4


def test_another_evaluation_needs_another_folder(live: LiveServer, tmp_path: Path) -> None:
    changes = {"tasks": "", "text": str(ROOT / "LICENSE"), "lengths": "300", "budgets": ""}
    first = arguments(live, tmp_path / "eval", count="1", **changes)
    assert RUN.invoke(app, first).exit_code == 0
    done = RUN.invoke(app, arguments(live, tmp_path / "eval", count="2", **changes))
    assert done.exit_code == 2
    assert "other settings" in done.output
