# SPDX-License-Identifier: Apache-2.0
"""What a calibration writes and takes up again: presets, and the state of an interrupted run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError

from sglang_sparse.calibrate.files import replacing
from sglang_sparse.config import (
    PATTERN_MODEL,
    ConfigError,
    Geometry,
    SparseConfig,
    list_presets,
    load_preset,
)
from sglang_sparse.config.presets import PresetFileError, read_json_file

STATE = "unfinished.pt"

Axis = Literal["layers", "heads"]


def base_preset(path: Path, axis: Axis, method: str) -> SparseConfig:
    """Return the preset that ``path`` holds, or the settings that every model starts from.

    Args:
        path: of the preset.
        axis: what is calibrated.
        method: whose settings a new preset takes, unless its file is named for another one whose
            choice on the axis is of the same kind.

    Raises:
        ConfigError: the file is no JSON, or holds no preset.
    """
    if not path.exists():
        if path.suffix != ".json":
            raise ConfigError(
                flag="--output",
                value=str(path),
                problem="it is no JSON file",
                allowed="a path that ends in .json",
                remedy=f"name one, such as configs/MODEL/{method}.json",
            )
        shipped = {ref.name for ref in list_presets() if ref.model == PATTERN_MODEL}
        pattern = load_preset(PATTERN_MODEL, method)
        base = load_preset(PATTERN_MODEL, path.stem if path.stem in shipped else method)
        if type(getattr(base, axis)) is not type(getattr(pattern, axis)):
            base = pattern
        return base.model_copy(update={"model": None})
    try:
        return SparseConfig.model_validate(read_json_file(path))
    except (PresetFileError, ValidationError) as error:
        raise ConfigError(
            flag="--output",
            value=str(path),
            problem="it is there and holds no preset "
            f"({error if isinstance(error, PresetFileError) else error.errors()[0]['msg']})",
            allowed="a new file, or a preset whose choice is to be replaced",
            remedy="name another one",
        ) from error


def model_name(path: Path, base: SparseConfig, geometry: Geometry) -> str:
    """Return what a preset calls its model: as it did before, or as its folder is called."""
    return base.model.name if base.model is not None else path.parent.name or geometry.name


def write_preset(
    path: Path, base: SparseConfig, axis: Axis, choice: BaseModel, geometry: Geometry
) -> None:
    """Write ``base`` with another choice on an axis, and with the geometry that it was made for."""
    named = geometry.model_copy(update={"name": model_name(path, base, geometry)})
    content = base.model_dump(mode="json", exclude_unset=True) | {
        "model": named.model_dump(mode="json"),
        axis: choice.model_dump(mode="json"),
    }
    SparseConfig.model_validate(content)
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def open_outputs(
    outputs: Sequence[Path], report: Path, axis: Axis, method: str
) -> list[tuple[Path, SparseConfig]]:
    """Return each preset to write with what it starts from; nothing is written yet.

    Args:
        outputs: presets to write.
        report: folder of the report, and of what an interrupted run has so far.
        axis, method: as :func:`base_preset` takes them.

    Raises:
        ConfigError: a path cannot be written, or holds no preset.
    """
    bases = [(path, base_preset(path, axis, method)) for path in outputs]
    check_writable("--report", report / STATE)
    for path in outputs:
        check_writable("--output", path)
    return bases


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written, before hours are spent on its content."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            flag=flag,
            value=str(path),
            problem=f"it cannot be written ({error.strerror})",
            allowed="a path that can be written",
            remedy="name another one",
        ) from error


def fingerprint(model: str, facts: Mapping[str, Any]) -> str:
    """Return what must be the same for sums to go on: the model's files, and ``facts``."""
    folder = Path(model)
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    content = {"model": model, "files": stats, **facts}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def save_state(state: Path, mark: str, content: Mapping[str, Any]) -> None:
    """Write what a run of the fingerprint ``mark`` has so far."""
    with replacing(state) as draft:
        torch.save({"fingerprint": mark, **content}, draft)


def resume(state: Path, mark: str) -> dict[str, Any] | None:
    """Return what an interrupted run of the same fingerprint left, or None.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not state.is_file():
        return None
    try:
        saved: dict[str, Any] = torch.load(state, weights_only=True)
        return saved if saved.pop("fingerprint") == mark else None
    except Exception as error:  # torch.load raises what it likes
        raise ConfigError(
            flag="--report",
            value=str(state.parent),
            problem=f"{state.name}, which an interrupted run left there, cannot be read ({error})",
            allowed="a folder, new or of an earlier run",
            remedy=f"remove {state}, or name another folder",
        ) from error
