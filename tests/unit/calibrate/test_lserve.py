# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse calibrate lserve`, whole: planted heads, interruptions, files, and misuse."""

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from scipy.stats import spearmanr
from typer.testing import CliRunner

from sglang_sparse.calibrate import heads_report, lserve
from sglang_sparse.calibrate.finders import GateTraining, leave_one_out, log_odds_slopes
from sglang_sparse.calibrate.gates import JUDGED, GatedModel, windowed_attention
from sglang_sparse.choices.heads._files import read_heads
from sglang_sparse.cli import app
from sglang_sparse.config import ConfigError, configs_dir, load_preset, resolve
from sglang_sparse.tasks import layout

MODEL = configs_dir() / "reference" / "model"
RUN = CliRunner()
SINK, LOCAL, LENGTH = 16, 64, 400
SHAPE = (6, 4)
OTHER_SHAPE = "0.1\t0.2\t0.3\t0.4\n" * 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded once, filler is short, and arms are few."""
    few = (tuple(f" Line {i} says nothing about it." for i in range(2000)),)
    monkeypatch.setattr(layout, "documents", lambda split: few)
    monkeypatch.setattr(lserve, "GatedModel", loaded)
    monkeypatch.setattr(heads_report, "ARM_SAMPLES", 2)


@cache
def load_once(sink: int, local: int) -> GatedModel:
    return GatedModel(str(MODEL), "cpu", sink=sink, local=local)


def loaded(path: str, device: str, *, sink: int, local: int) -> GatedModel:
    return load_once(sink, local) if path == str(MODEL) else GatedModel(
        path, device, sink=sink, local=local
    )  # fmt: skip


def settings(folder: Path, **changes: object) -> lserve.Settings:
    """Three short prompts of the reference model, unless ``changes`` say otherwise."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"prompt": f"Box {i} holds {i * 7919}. " + "Nothing is here. " * 90 + f"{i}"})
        for i in range(3)
    ]
    prompts = folder / "three.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    values: dict = {
        "model": str(MODEL), "prompts": prompts, "outputs": [folder / "lserve.json"],
        "report": folder / "report", "sink": 64, "local": 64, "count": 3, "max_tokens": 256,
        "steps": 12, "seed": 4,
    }  # fmt: skip
    return lserve.Settings(**values | changes)


def test_a_window_is_causal_attention_under_a_mask() -> None:
    random = torch.Generator().manual_seed(1)
    for length, sink, local in ((1500, 16, 64), (2100, 0, 1), (900, 128, 2000), (1030, 64, 1024)):
        q = torch.randn((1, 4, length, 16), generator=random)
        k, v = (torch.randn((1, 2, length, 16), generator=random) for _ in "kv")
        at = torch.arange(length)
        ago = at[:, None] - at
        mask = (ago >= 0) & ((ago < local) | (at < sink))
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
        got = windowed_attention(q, k, v, scale=0.25, sink=sink, local=local)
        torch.testing.assert_close(got, want)


def prompt(length: int, seed: int) -> list[int]:
    """Random words, so that no head has an easy time."""
    return torch.randint(
        300, 2000, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def test_a_gate_of_one_changes_nothing_and_of_zero_is_the_window() -> None:
    model = load_once(SINK, LOCAL)
    ids = model.tokens(prompt(LENGTH, 2))
    with torch.no_grad():
        dense, ones = model.hidden(ids), model.hidden(ids, model.ones())
        assert torch.equal(dense, ones)
        assert dense.shape[0] == JUDGED
        none = model.hidden(ids, torch.zeros_like(model.ones()))
        half = model.hidden(ids, model.ones() / 2)
        short = model.tokens(prompt(SINK + LOCAL, 3))
        torch.testing.assert_close(
            model.hidden(short, torch.zeros_like(model.ones())), model.hidden(short),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
    assert (none - dense).norm() > 0.1 * dense.norm()
    assert 0 < (half - dense).norm() < (none - dense).norm()


def planted_model(layer: int, head: int, rest: float) -> GatedModel:
    """The reference model in which all KV heads but one write ``rest`` of what they wrote."""
    model = GatedModel(str(MODEL), "cpu", sink=SINK, local=LOCAL)
    for index, block in enumerate(model._model.base_model.layers):
        weight = block.self_attn.o_proj.weight.data  # [width, heads * dim]
        scale = torch.full(SHAPE[1:], rest)
        if index == layer:
            scale[head] = 1.0
        weight *= scale.repeat_interleave(weight.shape[1] // SHAPE[1])
    return model


# A head of a late layer reads what earlier heads wrote: little of it is left at a tenth. So it is
# planted alone.
@pytest.mark.parametrize(("planted", "rest"), [((1, 2), 0.1), ((1, 0), 0.1), ((4, 0), 0.0)])
def test_every_finder_finds_a_planted_head(planted: tuple[int, int], rest: float) -> None:
    model = planted_model(*planted, rest)
    # Trained gates of the late layer part further on longer prompts.
    ids = [prompt(200 if rest else LENGTH, seed) for seed in range(3)]
    generator = torch.Generator().manual_seed(0)
    slopes = sum(log_odds_slopes(model, one, generator) for one in ids)
    left_out = leave_one_out(model, ids[0])
    training = GateTraining.start(model, steps=40, l1=0.05)
    for step in range(40):
        training.advance(model, ids[step % 3])
    for scores in (slopes, left_out, training.gates):
        assert divmod(int(scores.argmax()), SHAPE[1]) == planted
    others = torch.ones(SHAPE, dtype=torch.bool)
    others[planted] = False
    if rest:
        assert (slopes[others] > 0).all()
    else:
        assert (slopes[others] == 0).all()
        assert (left_out[others] == 0).all()
        assert (training.gates[others] < training.gates[planted] - 0.3).all()


def test_slopes_are_the_same_where_the_backward_pass_computes_layers_anew() -> None:
    """As it does on a GPU."""
    ids = torch.randint(300, 2000, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()

    def slopes(model: GatedModel) -> torch.Tensor:
        return log_odds_slopes(model, ids, torch.Generator().manual_seed(1))

    kept, anew = (GatedModel(str(MODEL), "cpu", sink=SINK, local=LOCAL) for _ in range(2))
    anew.recompute_layers()
    wanted = slopes(kept)
    assert (wanted > 0).any()
    torch.testing.assert_close(slopes(anew), wanted)
    training = [GateTraining.start(model, steps=3, l1=0.1) for model in (kept, anew)]
    for model, one in zip((kept, anew), training, strict=True):
        for _ in range(2):
            one.advance(model, ids)
    torch.testing.assert_close(training[1].gates, training[0].gates)


def test_gates_are_those_of_torchs_adamw() -> None:
    model = load_once(SINK, LOCAL)
    ids = [prompt(200, seed) for seed in range(2)]
    training = GateTraining.start(model, steps=5, l1=0.05)
    gates = torch.nn.Parameter(model.ones())
    adam = torch.optim.AdamW([gates], lr=1.0, weight_decay=0.0)
    for step in range(5):
        tokens = model.tokens(ids[step % 2])
        with torch.no_grad():
            dense = model.hidden(tokens)
        adam.param_groups[0]["lr"] = training.rate()
        adam.zero_grad()
        loss = (model.hidden(tokens, gates) - dense).square().mean() / dense.square().mean()
        (loss + 0.05 * gates.mean()).backward()
        adam.step()
        with torch.no_grad():
            gates.clamp_(0.0, 1.0)
        assert training.advance(model, ids[step % 2]) == pytest.approx(loss.item(), rel=1e-4)
    # Where a slope is nearly 0, its sign decides the first steps.
    torch.testing.assert_close(training.gates, gates.detach(), atol=1e-3, rtol=0)


def test_the_rate_rises_and_falls() -> None:
    training = GateTraining(torch.ones(1, 1), torch.zeros(2, 1, 1), 0, 10, 0.0)
    rates = [replace(training, step=step).rate() for step in range(10)]
    assert rates == [0.01, *[0.02] * 8, 0.01]


@pytest.mark.parametrize(
    ("finder", "owner", "name", "call", "calls"),
    [
        # Of three prompts the second is interrupted, and only the first is not done again.
        ("gradient", lserve, "log_odds_slopes", 2, 4),
        ("gradient", lserve, "leave_one_out", 2, 4),
        ("gates", lserve, "leave_one_out", 2, 4),
        # Of twelve steps the last; ten were saved.
        ("gates", GateTraining, "advance", 12, 14),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finder: str,
    owner: object,
    name: str,
    call: int,
    calls: int,
) -> None:
    quiet, checked = Console(quiet=True), name == "leave_one_out"
    asked = {"finder": finder, "check": checked}
    whole = lserve.calibrate(settings(tmp_path / "whole", **asked), quiet)
    run, runs = getattr(owner, name), []

    def counted(*args: object) -> object:
        runs.append(name)
        if len(runs) == call:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(owner, name, counted)
    again = settings(tmp_path / "again", **asked)
    with pytest.raises(KeyboardInterrupt):
        lserve.calibrate(again, quiet)
    assert not again.outputs[0].exists()
    if checked:  # the heads are found, and not found again
        monkeypatch.setattr(lserve, "log_odds_slopes", None)
        monkeypatch.setattr(GateTraining, "advance", None)
    # The model is called by the folder of its preset.
    own = {"model"}
    assert lserve.calibrate(again, quiet).model_dump(exclude=own) == whole.model_dump(exclude=own)
    assert len(runs) == calls
    report = {p.name: p.read_bytes() for p in (tmp_path / "whole" / "report").glob("*.*sv")}
    assert len(report) == 3 + checked
    assert report == {p.name: p.read_bytes() for p in again.report.glob("*.*sv")}
    assert not (again.report / lserve.STATE).exists()


def test_a_calibration_writes_a_preset_that_serves_gates_and_a_report(tmp_path: Path) -> None:
    arguments = [
        *("--model", str(MODEL), "--output", str(tmp_path / "lserve.json")),
        *("--report", str(tmp_path / "report"), "--count", "2", "--max-tokens", str(LENGTH)),
        *("--sink", "64", "--local", "128", "--check", "leave-one-out", "--device", "cpu"),
    ]
    result = RUN.invoke(app, ["calibrate", "lserve", *arguments])
    assert result.exit_code == 0, result.output
    assert "12 heads stream; wrote" in result.stdout
    geometry = load_preset("reference", "sparcas").model
    config = resolve("lserve", str(tmp_path / "lserve.json"), geometry)
    heads = config.heads
    assert (heads.kind, heads.window, len(heads.streaming)) == ("streaming", (64, 128), 6)
    assert (heads.calibration.finder, heads.calibration.prompts) == ("gradient", 2)
    assert config.score.select == 64
    # The same heads by DuoAttention's file.
    gates = read_heads(tmp_path / "report" / heads_report.DUO_ATTENTION_FILE, 0.5)
    assert tuple(map(tuple, gates["streaming"])) == heads.streaming
    rows = list(csv.DictReader((tmp_path / "report" / "heads.csv").open()))
    assert sum(int(row["streams"]) for row in rows) == 12
    scores, left_out = (
        [float(row[key]) for row in rows] for key in ("score", "divergence left out")
    )
    least = max(s for s, row in zip(scores, rows, strict=True) if int(row["streams"]))
    assert all(s >= least for s, row in zip(scores, rows, strict=True) if not int(row["streams"]))
    told = next(csv.DictReader((tmp_path / "report" / "correlation.csv").open()))
    assert float(told["spearman"]) == pytest.approx(spearmanr(scores, left_out).statistic, abs=1e-3)
    arms = {row["arm"]: row for row in csv.DictReader((tmp_path / "report" / "arms.csv").open())}
    assert list(arms) == ["dense", "chosen", "random 1", "random 2", "random 3"]
    assert {row["streaming heads"] for name, row in arms.items() if name != "dense"} == {"12"}
    for picture in ("heads.png", "arms.png", "check.png"):
        assert (tmp_path / "report" / picture).read_bytes().startswith(b"\x89PNG")


def test_heads_that_score_least_stream_as_many_where_it_is_asked() -> None:
    asked = lserve.Settings("", None, [], Path())
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 0.5, 9.0]], dtype=torch.float64)
    assert lserve.choose(asked, scores) == [[0, 1, 2], [2]]
    assert lserve.choose(replace(asked, equal_per_layer=True), scores) == [[0, 1], [0, 2]]
    assert lserve.choose(replace(asked, tp=2), scores) == [[0, 1, 2], [2]]
    even = replace(asked, equal_per_layer=True, tp=2)
    assert lserve.choose(even, scores) == [[0, 2], [0, 2]]
    assert lserve.choose(replace(asked, sparsity=0.25), scores) == [[0], [2]]
    assert lserve.choose(replace(asked, sparsity=0.75, tp=2), scores) == [[0, 1, 2, 3], [0, 2]]


def test_an_existing_preset_keeps_all_but_its_heads(tmp_path: Path) -> None:
    mine = load_preset("reference", "page_minmax").model_dump(mode="json")
    mine["budget"] = {"kind": "tokens", "tokens": 333}
    path = tmp_path / "lserve.json"
    path.write_text(json.dumps(mine))
    heads = lserve.calibrate(settings(tmp_path), Console(quiet=True))
    after = json.loads(path.read_text())
    assert after["heads"] == json.loads(heads.model_dump_json())
    assert {k: v for k, v in after.items() if k != "heads"} == {
        k: v for k, v in mine.items() if k != "heads"
    }


def test_gates_of_others_choose_the_heads(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(9)
    gates = torch.rand(SHAPE, generator=random)
    file = tmp_path / "theirs.tsv"
    file.write_text(heads_report.gates_text(gates.tolist()))
    asked = settings(tmp_path, gates=file, equal_per_layer=True, check=True)
    heads = lserve.calibrate(asked, Console(quiet=True))
    least = gates.argsort(1)[:, :2].sort(1).values
    assert heads.streaming == tuple(map(tuple, least.tolist()))
    assert heads.calibration == "published"
    assert (asked.report / heads_report.DUO_ATTENTION_FILE).read_text() == file.read_text()
    rows = list(csv.DictReader((asked.report / "correlation.csv").open()))
    assert [row["finder"] for row in rows] == ["file"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (OTHER_SHAPE, "it has 2 layers of 4 KV heads"),
        (OTHER_SHAPE * 3 + "0.1\n", "lines of different lengths"),
        (OTHER_SHAPE * 2 + "0.1\t0.2\t0.3\t1.4\n" * 2, "holds the gate 1.4"),
    ],
)
def test_gates_of_another_model_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "theirs.tsv"
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        lserve.calibrate(settings(tmp_path, gates=file), Console(quiet=True))
    assert str(caught.value).startswith(f"--gates {file}")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"sparsity": 0.0}, "--sparsity 0.0"),
        ({"sink": 100}, "--sink 100"),
        ({"local": 100}, "--local 100"),
        ({"local": 4096}, "--local 4096"),
        ({"tp": 3}, "--tp 3"),
        ({"equal_per_layer": True, "tp": 4}, "--sparsity 0.5"),
        ({"equal_per_layer": True, "sparsity": 0.4}, "--sparsity 0.4"),
        ({"equal_per_layer": True, "sparsity": 0.01}, "--sparsity 0.01"),
        ({"steps": 0}, "--steps 0"),
        ({"l1": -1.0}, "--l1 -1.0"),
        ({"count": 0}, "--count 0"),
        ({"model": "/nowhere"}, "--model /nowhere"),
        ({"outputs": [Path("lserve.txt")]}, "--output lserve.txt"),
        ({"prompts": Path("/nowhere.jsonl")}, "--prompts /nowhere.jsonl"),
        ({"gates": Path("/nowhere.tsv")}, "--gates /nowhere.tsv"),
    ],
)
def test_what_cannot_be_calibrated_is_told_in_one_line(
    tmp_path: Path, changes: dict, start: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        lserve.calibrate(settings(tmp_path, **changes), Console(quiet=True))
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)
