# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse eval` against a real server: the table, going on after an end, refusals."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_server import MODEL, LiveServer
from typer.testing import CliRunner

from sglang_sparse.cli import app
from sglang_sparse.reference.export import load
from sglang_sparse.tasks import FileEncoder

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LENGTH, DECODED, COUNT = 900, 16, 2
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
    assert values["dense"] == pytest.approx(perplexity_of_the_model(), rel=1e-3)
    assert values["128"] != pytest.approx(values["dense"], rel=1e-6), "it did not decode sparsely"
    # A budget of more than there is changes nothing.
    assert values["32768"] == pytest.approx(values["dense"], rel=1e-3)
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_url": "http://127.0.0.1:9"}, ["--base-url", "no SGLang server answered"]),
        ({"tasks": "passkeys"}, ["--tasks passkeys", "passkey"]),
        ({"budgets": "100000"}, ["--budgets 100000", "to 32768"]),
        ({"budgets": "many"}, ["--budgets many", "to 32768"]),
        ({"lengths": "12"}, ["--lengths 12", "256 to"]),
        ({"text": "/no/such/file"}, ["--text /no/such/file"]),
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


def test_another_evaluation_needs_another_folder(live: LiveServer, tmp_path: Path) -> None:
    changes = {"tasks": "", "text": str(ROOT / "LICENSE"), "lengths": "300", "budgets": ""}
    first = arguments(live, tmp_path / "eval", count="1", **changes)
    assert RUN.invoke(app, first).exit_code == 0
    done = RUN.invoke(app, arguments(live, tmp_path / "eval", count="2", **changes))
    assert done.exit_code == 2
    assert "other settings" in done.output
