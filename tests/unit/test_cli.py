# SPDX-License-Identifier: Apache-2.0
"""The `sglang-sparse` command."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sglang_sparse.cli import app
from sglang_sparse.config import list_presets, resolve, schema_text

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


def test_a_wrong_flag_ends_with_one_line_and_a_failing_status() -> None:
    for arguments in (["--method", "nope"], ["--method", "sparcas", "--model", "/nowhere"]):
        result = RUN.invoke(app, ["show", *arguments])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: --")
