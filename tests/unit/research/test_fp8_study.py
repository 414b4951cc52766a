# SPDX-License-Identifier: Apache-2.0
"""The study of fp8 KV rounds what a pool rounds, and compares arms prompt by prompt."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research import fp8_study
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import PLANES, Policy, stored

MODEL = configs_dir() / "reference" / "model"
PROMPTS = [list(range(100, 231)), list(range(300, 377))]
FP8 = torch.float8_e4m3fn


DENSE = (fp8_study.BASE, fp8_study.DENSE)


def said(points: float) -> str:
    """Points as the page has them."""
    text = f"{points:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "\N{MINUS SIGN}")


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.to(FP8).to(values.dtype)


def test_all_attention_reads_rows_in_the_dtype_of_the_pool() -> None:
    model = load(MODEL).eval()
    plain, narrow = Decoder(model, PROMPTS, 6), Decoder(model, PROMPTS, 6, kv_dtype=FP8)
    # Keys of the first layer follow from the tokens alone; those after it from what it attended to.
    assert torch.equal(narrow.k[0], rounded(plain.k[0]))
    assert not torch.equal(narrow.k[1], rounded(plain.k[1]))
    narrow.generate(Policy(), end=-1)
    for rows in (narrow.k, narrow.v):
        assert torch.equal(rows, rounded(rows))


@pytest.mark.parametrize("storage", ["fp8", "int4"])
def test_a_sketch_holds_every_key_that_was_written(storage: str) -> None:
    decoder = Decoder(load(MODEL).eval(), PROMPTS, 6, kv_dtype=FP8)
    for _ in range(2):  # a second reply writes its own keys
        decoder.generate(Policy("sparcas", 64, storage=storage), end=-1)
        for layer, keys in enumerate(decoder.k):
            for row, prompt in enumerate(PROMPTS):
                end = len(prompt) + 5
                kept = decoder.sketch[layer][row, :, :end]
                assert torch.equal(kept, stored(keys[row, :, :end], storage))


def test_ends_of_pages_are_rounded_to_the_dtype_asked_for() -> None:
    decoder = Decoder(load(MODEL).eval(), PROMPTS, 6, kv_dtype=FP8)
    policy = Policy("page_mean", 64, page=32)
    lengths = decoder.prompt_lengths + 5
    for dtype in (FP8, torch.bfloat16):
        decoder.plane_dtype = dtype
        decoder.generate(policy, end=-1)
        for layer, keys in enumerate(decoder.k):
            exact = PLANES["page_mean"](keys, lengths, 32)
            for kept, want in zip(decoder.planes[layer], exact, strict=True):
                live = want.isfinite()
                assert torch.equal(kept[live], want.to(dtype).to(want.dtype)[live])


def test_the_interval_of_paired_answers_covers_their_difference() -> None:
    random, covered, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        hard = random.random(150)
        ours, base = (
            "".join("01"[int(x)] for x in hard + 0.1 * random.standard_normal(150) < p)
            for p in (0.7, 0.75)
        )
        found = fp8_study.paired(ours, base)
        covered += found["low"] <= -5 <= found["high"]
        swapped = fp8_study.paired(base, ours)
        assert (swapped["low"], swapped["high"]) == (-found["high"], -found["low"])
        assert (swapped["gained"], swapped["lost"]) == (found["lost"], found["gained"])
    assert 0.92 <= covered / trials <= 0.98


def test_answers_that_are_all_alike_leave_the_interval_of_their_number() -> None:
    found = fp8_study.paired("1" * 768, "1" * 768)
    assert (found["points"], found["low"], found["high"]) == (0, -0.5, 0.5)


def page_and_rows(raw: str) -> tuple[str, list[dict[str, Any]]]:
    """The page about accuracy, and the comparisons of a committed report."""
    configs = configs_dir().resolve()
    content = (configs / "reference" / "fp8-report" / raw).read_bytes()
    found = json.loads(gzip.decompress(content))
    page = (configs.parent / "docs" / "accuracy.md").read_text()
    return page, [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def test_the_page_says_what_the_raw_file_holds() -> None:
    page, compared = page_and_rows("fp8.json.gz")
    left_out = ("sparcas fp8", "psa_sketch fp8", "kascade_sketch int4")  # beside dense
    pairs = [
        (row["arm"], row["than"])
        for row in compared
        if row["tasks"] == "words" and (row["than"] not in DENSE or row["arm"] not in left_out)
    ]
    assert len(pairs) == 17
    for row in compared:
        if row["tasks"] != "multi_query" and (row["arm"], row["than"]) in pairs:
            points, low, high = (said(row[key]) for key in ("points", "low", "high"))
            assert f"| {points} ({low} to {high}) |" in page, row


def test_the_command_goes_on_and_compares_every_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = tmp_path / "fp8.json", tmp_path / "report.json"
    arguments = ["fp8", "--model", str(MODEL), "--count", "1", "--length", "256", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--tasks", *fp8_study.POOLS["words"]])
    fp8_study.main()
    first = json.loads(out.read_text())
    monkeypatch.setattr(Decoder, "generate", lambda *_: pytest.fail("it was measured already"))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--report", str(table)])
    fp8_study.main()
    assert json.loads(out.read_text()) == first
    common, frequent = first["marks"].values()
    cell = {arm: common[arm] + frequent[arm] for arm in common}
    assert {len(marks) for marks in cell.values()} == {2}
    found = json.loads(table.read_text())
    assert found["cells"] == [
        [name, 1, [int(mark) for mark in marks.values()]] for name, marks in first["marks"].items()
    ]
    compared = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert set(cell) - {"dense bf16", "psa bf16"} == {row["arm"] for row in compared}
    for row in compared:
        own = fp8_study.paired(cell[row["arm"]], cell[row["than"]])
        assert row == {"tasks": "words", "arm": row["arm"], "than": row["than"], **own}
