# SPDX-License-Identifier: Apache-2.0
"""`configs/schema.json` is current, and says of a config what the models say."""

import json
from typing import Any

import jsonschema
import pytest

from sglang_sparse.config import configs_dir, json_schema, list_presets, schema_text

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_committed_schema_is_the_generated_one() -> None:
    assert (configs_dir() / "schema.json").read_text() == schema_text(), "run `make schema`"


def test_the_schema_is_valid_itself() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("ref", list_presets(), ids=str)
def test_every_preset_validates(ref: Any) -> None:
    VALIDATOR.validate(json.loads(ref.path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"bugdet": 1},
        {"budget": {"kind": "tokens", "tokens": 0}},
        {"budget": {"kind": "mass", "epsilon": 0.9}},
        {"budget": {"kind": "mass", "epsilon": 1.1, "cap": 4096}},
        {"budget": {"kind": "mass", "epsilon": 0.9, "cap": 4096, "microbatch": 48}},
        {"budget": {"kind": "tokens", "tokens": 2048, "floor": 1}},
        {"page_size": 48},
        {"score": None},
    ],
)
def test_the_schema_refuses_what_the_models_refuse(change: dict[str, Any]) -> None:
    preset = json.loads((configs_dir() / "generic" / "sparcas.json").read_text())
    assert VALIDATOR.is_valid(preset)
    assert not VALIDATOR.is_valid(preset | change)
