# SPDX-License-Identifier: Apache-2.0
"""Find and read preset files: `configs/<model>/<preset>.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sglang_sparse.config.model import Geometry

GENERIC_MODEL = "generic"
# A method without a generic preset starts from this model's settings, except for its layers.
PATTERN_MODEL = "llama-3.1-8b"
SCHEMA_FILE = "schema.json"


class PresetFileError(ValueError):
    """A config file or text that cannot be read as one JSON object."""


@dataclass(frozen=True)
class PresetRef:
    """A preset that ships with the package."""

    model: str
    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.model}/{self.name}"


def configs_dir() -> Path:
    """Return the folder that holds the presets and their schema."""
    return Path(__file__).parent.parent / "_configs"


def list_presets() -> list[PresetRef]:
    """Return every shipped preset, sorted by model, then by name."""
    refs = [
        PresetRef(model=path.parent.name, name=path.stem, path=path)
        for path in configs_dir().glob("*/*.json")
    ]
    return sorted(refs, key=lambda ref: (ref.model, ref.name))


def find_preset(name: str, geometry: Geometry | None) -> PresetRef | None:
    """Return the preset that `name` means for a model, or None if there is none.

    `<model>/<preset>` names one file. `<preset>` alone means the one made for `geometry`, else the
    generic one. A preset whose layers were chosen on a model has no generic one.

    Raises:
        PresetFileError: a preset of that name is damaged.
    """
    refs = list_presets()
    if "/" in name:
        return next((ref for ref in refs if str(ref) == name), None)
    named = [ref for ref in refs if ref.name == name]
    if geometry is not None:
        for ref in named:
            if ref.model != GENERIC_MODEL and _geometry_of(ref) == geometry.shape:
                return ref
    return next((ref for ref in named if ref.model == GENERIC_MODEL), None)


def _geometry_of(ref: PresetRef) -> tuple[int, int, int, int]:
    try:
        return Geometry.model_validate(read_json_file(ref.path).get("model")).shape
    except ValidationError as error:
        raise PresetFileError(f"{ref.path} does not say which model it is for") from error


def read_json_file(path: Path) -> dict[str, Any]:
    """Read one JSON object from `path`.

    Raises:
        PresetFileError: the file is missing, unreadable, or not one JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        told = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        reason = error.strerror if isinstance(error, OSError) else told
        raise PresetFileError(f"cannot read {path}: {reason}") from error
    return parse_json_object(text, origin=str(path))


def parse_json_object(text: str, *, origin: str) -> dict[str, Any]:
    """Parse one JSON object strictly: no repeated keys, no NaN or Infinity.

    Raises:
        PresetFileError: `text` is anything else; the message names `origin` and the place.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise PresetFileError(f"{origin} is not valid JSON: {error.msg} at {place}") from error
    except (ValueError, RecursionError) as error:
        raise PresetFileError(f"{origin} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise PresetFileError(f"{origin} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is given twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
