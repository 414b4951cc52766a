# SPDX-License-Identifier: Apache-2.0
"""SparCas' channels that are kept for many steps, layer by layer."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research import refresh_study
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Cache, Policy, sparcas_channels, sparcas_scores
from sglang_sparse.research.tables import cells_of

MODEL = configs_dir() / "reference" / "model"
SPARCAS = Policy("sparcas", 64, dense_layers=1)


def decoder_of_a_prompt(room: int) -> Decoder:
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(300, 2000, (200,), generator=generator).tolist()
    return Decoder(load(MODEL).eval(), [prompt], room)


def test_scores_are_products_over_the_channels_that_are_given() -> None:
    q, k = torch.randn(2, 8, 64), torch.randn(2, 4, 50, 64)
    chosen = sparcas_channels(q, k, 16)
    sums = q.view(2, 4, 2, 64).abs().sum(2)
    assert torch.equal(chosen.sort(-1).values, sums.topk(16).indices.sort(-1).values)
    one = torch.tensor([3]).expand(2, 4, 1)
    want = q.view(2, 4, 2, 64)[..., 3, None] * k[:, :, None, :, 3]
    torch.testing.assert_close(sparcas_scores(q, k, one), want)


def test_a_layer_keeps_its_channels_for_as_many_steps_as_it_says() -> None:
    decoder, seen = decoder_of_a_prompt(8), []

    def watch(layer: int, q: torch.Tensor, cache: Cache, _: torch.Tensor) -> None:
        assert cache.sketch is not None
        assert cache.channels is not None
        seen.append((layer, cache.channels, sparcas_channels(q, cache.sketch, 16)))

    decoder.watch = watch
    decoder.generate(replace(SPARCAS, refresh=(1, 3, 1, 1, 1, 1)), end=-1)
    kept = [channels for layer, channels, _ in seen if layer == 1]
    new = [chosen for layer, _, chosen in seen if layer == 1]
    for step in range(7):
        assert torch.equal(kept[step], new[step - step % 3])
    assert not all(torch.equal(a, b) for a, b in zip(kept, new, strict=True))
    assert all(torch.equal(channels, chosen) for layer, channels, chosen in seen if layer != 1)


def test_channels_that_are_chosen_at_every_step_change_nothing() -> None:
    decoder = decoder_of_a_prompt(8)
    plain = decoder.generate(SPARCAS, end=-1)
    assert decoder.generate(replace(SPARCAS, refresh=(1,) * 6), end=-1) == plain


def test_drift_compares_later_steps_with_the_first() -> None:
    policy = Policy("sparcas", 49, channels=1, dense_layers=1)
    drift = refresh_study.Drift(policy, 3)
    # Both queries attend to token 200: the first by channel 5, the second by channel 9.
    k = torch.randn(1, 4, 400, 64) / 100
    k[:, :, 200, 5] = k[:, :, 200, 9] = 9
    cache, lengths = Cache(k, k, k), torch.tensor([400])
    first, second, near = torch.zeros(3, 1, 8, 64)
    first[..., 5] = second[..., 9] = 9.0
    for q in (first, first):
        drift(1, q, cache, lengths)
    for q in (first, second):
        drift(2, q, cache, lengths)
    same, other = drift.rows()
    assert (same["layer"], same["again"], same["afar"]) == (1, 1.0, 1.0)
    assert same["by_new"] == same["by_kept"] > 0.98
    # Channel 5 of the second query is 0, so it ranks nothing.
    assert (other["layer"], other["again"], other["afar"]) == (2, 0.0, 1.0)
    assert other["by_new"] > 0.98
    assert other["by_kept"] < 0.01
    near[..., 3] = k[:, :, 399, 3] = 20.0
    drift(2, near, cache, lengths)
    assert drift.rows()[1]["afar"] == 0.5
    assert drift.rows()[1]["by_new"] == other["by_new"]
    drift.begin()
    drift(2, second, cache, lengths)
    assert drift.seen.tolist() == [0, 4, 8]


def test_the_command_measures_each_arm_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "refresh.json", tmp_path / "table.md"
    flags = ["--count", "1", "--length", "1024", "--tasks", "passkey", "--table", str(table)]
    monkeypatch.setattr(sys, "argv", ["refresh_study", "--out", str(out), *flags])
    refresh_study.main()
    result = json.loads(out.read_text())
    one_layer = [f"layer {layer}" for layer in range(1, 6)]
    assert [cell["arm"] for cell in result["cells"]] == ["none", "all", *one_layer]
    assert result["cells"][0]["exact"] == 1.0
    assert [row["layer"] for row in result["drift"]] == [1, 2, 3, 4, 5]
    assert all(0 <= row[name] <= 1 for row in result["drift"] for name in ("again", "afar"))
    assert capsys.readouterr().out.endswith(table.read_text())
    assert table.read_text().splitlines()[2].startswith("| none | 100.0 | ")


def test_the_committed_table_is_that_of_the_committed_cells() -> None:
    path = configs_dir() / "reference" / "sparcas-report" / "refresh.json.gz"
    raw = json.loads(gzip.decompress(path.read_bytes()))
    table = refresh_study.summary(raw | {"cells": cells_of(raw)})
    assert table in (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text()
