# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of a preset and the keys of each object, generated from the pydantic models."""

import json
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from sglang_sparse.config.model import SparseConfig


class _WithoutTitles(GenerateJsonSchema):
    """A key's title would be its name once more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) that `configs/schema.json` holds.

    It says what each key may be; the rules between keys are in `SparseConfig` alone.
    """
    schema = SparseConfig.model_json_schema(schema_generator=_WithoutTitles)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """Return the exact content of `configs/schema.json`."""
    return json.dumps(json_schema(), indent=0, separators=(",", ":")) + "\n"


@cache
def key_sets() -> dict[tuple[str, ...], list[str]]:
    """Return the keys of every object in a config, by its path.

    A choice among several has its kind in the path: `("budget", "tokens")`. `()` is the config.
    """
    sets: dict[tuple[str, ...], list[str]] = {(): list(SparseConfig.model_fields)}
    for name, field in SparseConfig.model_fields.items():
        for model in get_args(field.annotation) or (field.annotation,):
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                continue
            kind = model.model_fields.get("kind")
            path = (name,) if field.discriminator is None or kind is None else (name, kind.default)
            sets[path] = list(model.model_fields)
    return sets
