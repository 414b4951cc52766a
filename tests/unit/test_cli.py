# SPDX-License-Identifier: Apache-2.0
"""The `sglang-sparse` command."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sglang_sparse import cli
from sglang_sparse.cli import app
from sglang_sparse.config import ConfigError, list_presets, resolve, schema_text
from sglang_sparse.evaluate.journal import Journal

RUN = CliRunner()


def test_presets_lists_every_preset() -> None:
    result = RUN.invoke(app, ["presets"])
    assert result.exit_code == 0
    for ref in list_presets():
        assert str(ref) in result.output


def test_schema_prints_what_is_committed() -> None:
    assert RUN.invoke(app, ["schema"]).output == schema_text()
    assert RUN.invoke(app, ["schema", "--check"]).exit_code == 0


def test_show_prints_the_config_that_a_server_would_use() -> None:
    change = '{"budget": {"tokens": 4096}}'
    result = RUN.invoke(
        app, ["show", "--method", "sparcas", "--model", "qwen3-8b", "--config", change]
    )
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert shown["model"]["num_hidden_layers"] == 36
    assert shown["budget"] == {"kind": "tokens", "tokens": 4096, "max_tokens": None}
    assert "qwen3-8b/sparcas + inline JSON" in result.stderr


def test_show_reads_a_model_folder(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = RUN.invoke(app, ["show", "--method", "page_minmax", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "layers.n 2 leaves no sparse layer" in result.stderr

    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    result = RUN.invoke(app, ["show", "--method", "page_minmax", "--model", str(tmp_path)])
    assert json.loads(result.stdout) == resolve("page_minmax", None).model_dump(mode="json")


GOOD = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64}


def is_one_line(result: Result) -> bool:
    """Whether a command ended in a failing status, with nothing but one line."""
    told = result.stdout == "" and result.stderr.count("\n") == 1
    return told and result.exit_code == 2 and result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "it holds a JSON list, not an object"),
        (b"null", "it holds a JSON NoneType, not an object"),
        (b"", "JSONDecodeError"),
        (b'{"a":' * 9000, "RecursionError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"{}", "num_attention_heads is None"),
        (json.dumps(GOOD | {"num_attention_heads": 0}).encode(), "num_attention_heads is 0"),
        (json.dumps(GOOD | {"num_hidden_layers": 0}).encode(), "num_hidden_layers is 0"),
        (json.dumps(GOOD | {"num_hidden_layers": "4"}).encode(), "num_hidden_layers is '4'"),
        (json.dumps(GOOD | {"num_key_value_heads": 0}).encode(), "num_key_value_heads is 0"),
        (json.dumps(GOOD | {"num_key_value_heads": [2]}).encode(), "num_key_value_heads is [2]"),
        (json.dumps(GOOD | {"head_dim": -64}).encode(), "head_dim is -64"),
        (json.dumps(GOOD | {"head_dim": None}).encode(), "hidden_size is None"),
        (json.dumps(GOOD | {"head_dim": None, "hidden_size": 4}).encode(), "hidden_size 4 holds"),
    ],
)
def test_a_config_that_holds_no_geometry_is_told_in_one_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    result = RUN.invoke(app, ["show", "--method", "sparcas", "--model", str(tmp_path)])
    assert is_one_line(result), result.output
    assert words in result.stderr


def test_a_model_without_a_config_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "folder", tmp_path / "none"):
        assert is_one_line(RUN.invoke(app, ["show", "--method", "sparcas", "--model", str(folder)]))


def test_files_that_cannot_be_used_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder.json"
    file.write_text("x")
    folder.mkdir()
    calibrate = ["calibrate", "kascade", "--model", "/nowhere", "--report"]
    for report, output in (
        (tmp_path, file / "kascade.json"),
        (tmp_path, file),
        (tmp_path, folder),
        (file, tmp_path / "kascade.json"),
    ):
        result = RUN.invoke(app, [*calibrate, str(report), "--output", str(output)])
        assert is_one_line(result), result.output
        assert "--report" in result.stderr if report == file else "--output" in result.stderr
    monkeypatch.setattr(cli, "configs_dir", lambda: file)
    assert is_one_line(RUN.invoke(app, ["schema", "--write"]))


@pytest.mark.parametrize("name", ["settings.json", "journal.jsonl"])
@pytest.mark.parametrize("content", [b"{\n", b"[1]\n", b"\xff\n", b'{"task": 1}\n'])
def test_a_damaged_evaluation_is_told_in_one_line(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Journal(tmp_path, {"task": 2})
    assert str(refused.value).startswith(f"--out {tmp_path}: ")
    assert "\n" not in str(refused.value)


def test_a_wrong_flag_ends_with_one_line_and_a_failing_status() -> None:
    for arguments in (["--method", "nope"], ["--method", "sparcas", "--model", "/nowhere"]):
        result = RUN.invoke(app, ["show", *arguments])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: --")
