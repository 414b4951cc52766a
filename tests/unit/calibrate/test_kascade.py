# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse calibrate kascade`, whole: on the reference model, interrupted, and misused."""

import csv
import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_sparse.calibrate import kascade
from sglang_sparse.calibrate.capture import Capture
from sglang_sparse.cli import app
from sglang_sparse.config import ConfigError, configs_dir, load_preset, resolve
from sglang_sparse.tasks import layout

LICENSE = Path(__file__).parents[3] / "LICENSE"
MODEL = configs_dir() / "reference" / "model"
RUN = CliRunner()


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded once."""
    monkeypatch.setattr(kascade, "Capture", load_once)


@cache
def load_once(path: str, device: str) -> Capture:
    return Capture(path, device)


def settings(folder: Path, **changes: object) -> kascade.Settings:
    """Three short prompts of the reference model, unless ``changes`` say otherwise."""
    folder.mkdir(exist_ok=True)
    facts = [f"The magic number of box {i} is {i * 7919}. " * 20 for i in range(3)]
    prompts = write_prompts(folder / "three.jsonl", [json.dumps({"prompt": f}) for f in facts])
    values: dict = {
        "model": str(MODEL), "prompts": prompts, "anchors": 3, "outputs": [folder / "kascade.json"],
        "report": folder / "report", "count": 3, "max_tokens": 150, "top_k": 16, "seed": 4,
    }  # fmt: skip
    return kascade.Settings(**values | changes)


def write_prompts(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_calibration_writes_a_preset_that_serves_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short filler: reading the whole of it takes longer than all else.
    few = (tuple(f" Line {i} says nothing about it." for i in range(2000)),)
    monkeypatch.setattr(layout, "documents", lambda split: few)
    arguments = [
        "--model",
        str(MODEL),
        "--output",
        str(tmp_path / "kascade.json"),
        "--anchors",
        "3",
    ]
    arguments += ["--report", str(tmp_path / "report"), "--count", "2", "--max-tokens", "400"]
    result = RUN.invoke(app, ["calibrate", "kascade", *arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    config = resolve(
        "custom", str(tmp_path / "kascade.json"), load_preset("reference", "kascade").model
    )
    assert len(config.layers.anchors) == 3
    assert f"anchors {list(config.layers.anchors)}" in result.stdout
    assert [reuse.layer for reuse in config.layers.reuse] == [
        i for i in range(6) if i not in config.layers.anchors
    ]
    assert (config.layers.calibration.prompts, config.layers.calibration.top_k) == (2, 64)
    rows = list(csv.reader((tmp_path / "report" / "similarity.csv").open()))
    assert len(rows) == 7
    assert float(rows[1][1]) == 1.0
    layers = list(csv.DictReader((tmp_path / "report" / "layers.csv").open()))
    assert {int(row["anchor"]) for row in layers} == set(config.layers.anchors)
    for picture in ("similarity.png", "importance.png"):
        assert (tmp_path / "report" / picture).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "report" / kascade.STATE).exists()


def test_an_existing_preset_keeps_all_but_its_layers(tmp_path: Path) -> None:
    mine = load_preset("reference", "kascade").model_dump(mode="json")
    mine["budget"] = {"kind": "tokens", "tokens": 333}
    path = tmp_path / "kascade.json"
    path.write_text(json.dumps(mine))
    kascade.calibrate(settings(tmp_path), Console(quiet=True))
    after = json.loads(path.read_text())
    assert after["layers"]["anchors"] != mine["layers"]["anchors"]
    assert {k: v for k, v in after.items() if k != "layers"} == {
        k: v for k, v in mine.items() if k != "layers"
    }


def test_an_interrupted_run_goes_on_and_ends_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kascade.calibrate(settings(tmp_path / "whole"), Console(quiet=True))
    runs, run = [], Capture.run

    def counted(self: Capture, ids: list[int], importance: str) -> object:
        runs.append(len(ids))
        if len(runs) == 3:
            raise KeyboardInterrupt
        return run(self, ids, importance)

    monkeypatch.setattr(Capture, "run", counted)
    again = settings(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        kascade.calibrate(again, Console(quiet=True))
    assert not again.outputs[0].exists()
    assert kascade.calibrate(again, Console(quiet=True)) == whole
    assert len(runs) == 4  # two, the one that was interrupted, and that one again
    report = {p.name: p.read_bytes() for p in (tmp_path / "whole" / "report").glob("*.csv")}
    assert report == {p.name: p.read_bytes() for p in again.report.glob("*.csv")}


def test_the_effect_of_a_layer_is_what_predictions_lose_without_it() -> None:
    capture = load_once(str(MODEL), "cpu")
    text, fact = LICENSE.read_text(), "The pass key is 48213."
    asked = f"{text[400:1400]} {fact} {text[2000:3500]}\n\nWhat is the pass key?"
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": fact}]
    ids = capture.tokenizer.apply_chat_template(chat, return_dict=False)
    layers, effect = capture.run(ids, "effect")
    again, cosine = capture.run(ids, "cosine")
    assert all(torch.equal(a.q, b.q) for a, b in zip(layers, again, strict=True))
    # The card's ablation: layer 5 retrieves, alone.
    assert effect[5] > 10 * max(effect[:5])
    assert max(cosine) == cosine[0]
    short, none = capture.run(ids[:60], "effect")
    assert len(short) == 6
    assert none == [0.0] * 6  # the window holds all of it


def test_maps_follow_the_mean_over_queries_and_anchors_the_least(tmp_path: Path) -> None:
    geometry = load_preset("reference", "kascade").model
    sums = kascade.Sums.zeros(geometry)
    sums.done = 2
    sums.importance += 2.0
    sums.heads += 1.0
    sums.head_means += 1.0
    for a, b in ((0, 3), (2, 3)):
        # One query of head 0 finds nothing with the list of head 2, which suits all others best.
        sums.heads[a, b, 2, 0], sums.head_means[a, b, 2, 0] = 0.0, 1.8
    sums.heads[1, 2] = 1.6
    measured = sums.means(1)
    assert measured.maps[2, 3].tolist() == [2, 1, 2, 3]
    assert measured.mapped[2, 3] == pytest.approx(0.375)  # mean of 0 and three times 0.5
    assert measured.mapped[1, 2] == pytest.approx(0.8)
    chosen = kascade.choose(settings(tmp_path, anchors=5), measured, 2, "0" * 64)
    assert chosen.anchors == (0, 1, 3, 4, 5)
    assert [(reuse.layer, reuse.heads) for reuse in chosen.reuse] == [(2, (0, 1, 2, 3))]
    assert chosen.calibration.prompts == 2


def test_sums_of_other_prompts_are_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(tmp_path)
    state = asked.report / kascade.STATE
    asked.report.mkdir()
    stale = kascade.Sums.zeros(load_preset("reference", "kascade").model)
    torch.save({"fingerprint": "another", **vars(stale)}, state)
    kascade.calibrate(asked, Console(quiet=True))
    layers = resolve("custom", str(asked.outputs[0])).layers
    assert layers.calibration.prompts == 3


def test_sums_that_cannot_be_read_are_told_in_one_line(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    asked.report.mkdir()
    (asked.report / kascade.STATE).write_text("not what torch saved")
    with pytest.raises(ConfigError) as caught:
        kascade.calibrate(asked, Console(quiet=True))
    assert str(caught.value).startswith(f"--report {asked.report}: {kascade.STATE}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "method"), [("kascade_sketch", "kascade_sketch"), ("sparcas", "kascade")]
)
def test_a_new_preset_takes_the_settings_that_its_name_says(
    tmp_path: Path, file: str, method: str
) -> None:
    path = tmp_path / f"{file}.json"
    kascade.calibrate(settings(tmp_path, outputs=[path]), Console(quiet=True))
    written, shipped = resolve("custom", str(path)), load_preset("llama-3.1-8b", method)
    assert written.model.shape == load_preset("reference", "kascade").model.shape
    own = {"layers", "model"}
    assert written.model_dump(exclude=own) == shipped.model_dump(exclude=own)
    assert resolve("kascade", str(path), written.model).score == written.score


def test_prompts_come_from_a_file_and_its_hash_is_recorded(tmp_path: Path) -> None:
    text = "The magic number is 17. " * 60
    chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "17"}]}
    lines = [json.dumps({"prompt": text}), json.dumps(chat), json.dumps({"prompt": text + "!"})]
    path = write_prompts(tmp_path / "prompts.jsonl", lines)
    kascade.calibrate(settings(tmp_path, prompts=path, count=2), Console(quiet=True))
    found = resolve("custom", str(tmp_path / "kascade.json")).layers.calibration
    assert found.prompts == 2
    assert found.prompts_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "' + "a b " * 99 + '"}', ""], ["line 2 is empty"]),
        (['{"prompt": " "}'], ["line 1 has an empty prompt"]),
        (['{"prompt": "short"}'], ["line 1 has", "tokens, which is too short (least 32)"]),
        (["{"], ["line 1 is not JSON"]),
        (['"text"', '{"text": 1}'], ["line 1 has neither", "line 2 has neither"]),
        (['{"messages": [1]}'], ["line 1 does not fit the chat template"]),
        (["[" * 100_000], ["line 1 is nested too deeply"]),
        ([r'{"prompt": "\ud800"}'], ["line 1 cannot be tokenized"]),
        (["{"] * 7, ["line 5 is not JSON", "and 2 more"]),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, lines: list[str], words: list[str]) -> None:
    path = write_prompts(tmp_path / "prompts.jsonl", lines)
    with pytest.raises(ConfigError) as caught:
        kascade.calibrate(settings(tmp_path, prompts=path), Console(quiet=True))
    told = str(caught.value)
    assert told.startswith("--prompts")
    assert "\n" not in told
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"anchors": 7}, "--anchors 7"),
        ({"tp": 3}, "--tp 3"),
        ({"tp": 0}, "--tp 0"),
        ({"top_k": 76}, "--top-k 76"),
        ({"model": "/nowhere"}, "--model /nowhere"),
        ({"outputs": [Path("kascade.txt")]}, "--output kascade.txt"),
        ({"prompts": Path("/nowhere.jsonl")}, "--prompts /nowhere.jsonl"),
    ],
)
def test_what_cannot_be_calibrated_is_told_in_one_line(
    tmp_path: Path, changes: dict, start: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kascade.calibrate(settings(tmp_path, **changes), Console(quiet=True))
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_being_written_leaves_the_old_one(tmp_path: Path) -> None:
    from sglang_sparse.calibrate.files import replacing

    path = tmp_path / "kascade.json"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as draft:
            draft.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_shipped_presets_say_whether_they_are_calibrated() -> None:
    exact, sketch = load_preset("reference", "kascade"), load_preset("reference", "kascade_sketch")
    assert exact.layers == sketch.layers
    assert exact.layers.calibration.prompts > 0
    published = {"llama-3.1-8b": (0, 2, 8, 13, 14), "qwen3-8b": (0, 2, 7, 14, 23)}
    for model, anchors in published.items():
        for name in ("kascade", "kascade_sketch"):
            layers = load_preset(model, name).layers
            assert layers.anchors == anchors
            assert (layers.reuse, layers.calibration) == ("identity", "uncalibrated")
