# SPDX-License-Identifier: Apache-2.0
"""From the two flags to one `SparseConfig`.

`--sparse-method` names a starting point and `--sparse-config` what to change in it:

| method | config | result |
| --- | --- | --- |
| a preset's name | none | that preset, for the served model's geometry, else the generic one |
| a preset's name | inline JSON or a file | the same, with the given keys merged over it |
| a preset's name | `<model>/<same preset>` | that file |
| custom or none | a preset's name, a file, inline JSON | exactly what is given |

A method whose presets were all made for other models needs a config with what is measured on a
model, its layers or heads, which is merged over the rest of its settings. Files that a choice names
lie relative to the config that names them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sglang_sparse.config.errors import ConfigError, InvalidConfig, from_validation_error
from sglang_sparse.config.model import Geometry, SparseConfig, check_fits, preset_hash
from sglang_sparse.config.presets import (
    GENERIC_MODEL,
    PATTERN_MODEL,
    PresetFileError,
    PresetRef,
    find_preset,
    list_presets,
    parse_json_object,
    read_json_file,
)
from sglang_sparse.config.schema import key_sets

METHOD_FLAG = "--sparse-method"
CONFIG_FLAG = "--sparse-config"
CUSTOM = "custom"
# Axes whose choice is measured on each model, if it says how.
_MEASURED = ("layers", "heads")
_SEE = "`sglang-sparse schema` prints every key"
_REINSTALL = "reinstall sglang-sparse"


@dataclass(frozen=True)
class Resolved:
    """A config and where it came from.

    Attributes:
        config: the validated config.
        method: what `--sparse-method` said, or the preset's name, or `custom`.
        source: for people: the preset or file it was read from, and what was merged over it.
        hash: `preset_hash(config)`.
        given: what `--sparse-config` said, or None.
        shipped_reach: whether `min_sparse_tokens` is a shipped preset's own.
    """

    config: SparseConfig
    method: str
    source: str
    hash: str
    given: str | None = None
    shipped_reach: bool = False


@dataclass(frozen=True)
class _Draft:
    """Raw content of a config, with the flag, value and remedy that an error about it names.

    `shipped_reach` is of `Resolved`.
    """

    content: Mapping[str, Any]
    method: str
    source: str
    flag: str
    value: str
    remedy: str
    shipped_reach: bool = False


def available_methods() -> tuple[str, ...]:
    """Return what `--sparse-method` may be: the name of every preset, and `custom`."""
    names = {ref.name for ref in list_presets()}
    return (*sorted(names), CUSTOM)


def resolve(
    method: str | None, config: str | None, geometry: Geometry | None = None
) -> SparseConfig:
    """Return the config that the two flags mean on a model.

    Args:
        method: the value of `--sparse-method`, or None if it was not given.
        config: the value of `--sparse-config`: a preset's name, a path to a JSON file, or inline
            JSON; None if it was not given.
        geometry: the served model's; None skips every check against a model and takes the generic
            preset, if the method has one.

    Raises:
        ConfigError: anything about them is wrong; its text is the one line to end the start with.
    """
    return resolve_with_source(method, config, geometry).config


def resolve_with_source(
    method: str | None, config: str | None, geometry: Geometry | None = None
) -> Resolved:
    """Return the config that the two flags mean on a model, and where it came from.

    Takes and raises what `resolve` does.
    """
    draft = _draft(method, config, geometry)
    validated = _validate(draft)
    if geometry is not None:
        _check_geometry(validated, geometry, draft)
    return Resolved(
        config=validated,
        method=draft.method,
        source=draft.source,
        hash=preset_hash(validated),
        given=None if config is None else config.strip(),
        shipped_reach=draft.shipped_reach,
    )


def load_preset(model: str, name: str) -> SparseConfig:
    """Return the shipped preset `configs/<model>/<name>.json`.

    Raises:
        ConfigError: there is no such preset, or its file is damaged.
    """
    return resolve(None, f"{model}/{name}")


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` merged in, object by object; neither argument is changed.

    An object whose `kind` changes is replaced whole: the old keys mean nothing to the new kind.
    """
    merged = dict(base)
    for key, change in changes.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(change, Mapping)
            and change.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = deep_merge(old, change)
        else:
            merged[key] = change
    return merged


def _draft(method: str | None, config: str | None, geometry: Geometry | None) -> _Draft:
    _check_method(method, config)
    if config is None:
        assert method is not None, "_check_method lets no call without either flag pass"
        return _method_draft(method, geometry)
    config = config.strip()
    is_inline = config.startswith(("{", "["))
    if not is_inline and not _is_path(config):
        return _named_preset_draft(method, config, geometry)

    try:
        content = (
            parse_json_object(config, origin="the text")
            if is_inline
            else _located(read_json_file(Path(config)), Path(config).parent)
        )
    except PresetFileError as error:
        raise _unreadable(CONFIG_FLAG, config, error, shipped=False) from error
    origin = "inline JSON" if is_inline else config
    if method is None or method == CUSTOM:
        return _Draft(content, CUSTOM, origin, CONFIG_FLAG, config, f"correct the key ({_SEE})")
    base = _base_draft(method, geometry, content)
    merged = deep_merge(base.content, content)
    remedy = f"correct the key, or leave it out to keep the preset's value ({_SEE})"
    source, shipped = f"{base.source} + {origin}", "min_sparse_tokens" not in content
    return _Draft(merged, method, source, CONFIG_FLAG, config, remedy, shipped)


def _check_method(method: str | None, config: str | None) -> None:
    methods = available_methods()
    if method is None and config is None:
        raise ConfigError(
            flag=METHOD_FLAG,
            value=None,
            problem="it is not set, and neither is --sparse-config",
            allowed="|".join(methods),
            remedy=f"add {METHOD_FLAG} with one of these",
        )
    if method is not None and method not in methods:
        raise ConfigError(
            flag=METHOD_FLAG,
            value=method,
            problem="there is no such method",
            allowed="|".join(methods),
            remedy="name one of these",
        )
    if method == CUSTOM and config is None:
        raise ConfigError(
            flag=METHOD_FLAG,
            value=method,
            problem="a custom method has no preset to start from",
            allowed=f"{CUSTOM} together with {CONFIG_FLAG}",
            remedy=f"add {CONFIG_FLAG} with a preset's name, a path or inline JSON",
        )


def _is_path(value: str) -> bool:
    """Tell a path from a preset's name; a preset wins over a file of the same name."""
    if value.endswith(".json"):
        return True
    is_preset = any(value in (ref.name, str(ref)) for ref in list_presets())
    return not is_preset and os.path.isfile(value)


def _method_draft(method: str, geometry: Geometry | None) -> _Draft:
    ref = _find(method, geometry, METHOD_FLAG)
    if ref is None:
        raise _no_preset(method, geometry, METHOD_FLAG)
    return _preset_draft(ref, method, METHOD_FLAG, method)


def _base_draft(method: str, geometry: Geometry | None, given: Mapping[str, Any]) -> _Draft:
    """Return the preset that a config, of the content `given`, is merged over.

    If no preset of the method was made for this model, and the config has what is measured on a
    model, it is a preset of another model without its geometry and without that.
    """
    ref = _find(method, geometry, METHOD_FLAG)
    chosen = ref or _find(f"{PATTERN_MODEL}/{method}", None, METHOD_FLAG)
    if chosen is None:
        raise _no_preset(method, geometry, METHOD_FLAG)
    base = _preset_draft(chosen, method, METHOD_FLAG, method)
    config = _validate(base)
    if ref is not None:
        return base
    axis = _measured_axis(config)
    if axis not in given:
        raise _no_preset(method, geometry, METHOD_FLAG)
    content = {key: value for key, value in base.content.items() if key != "model"}
    content[axis] = {"kind": getattr(config, axis).kind}
    return replace(base, content=content, source=f"{chosen} but for its {axis}")


def _measured_axis(config: SparseConfig) -> str:
    """Return the axis whose choice is measured on each model; `layers` if none is."""
    measured = (
        axis for axis in _MEASURED if getattr(config, axis).how_to_measure("", "") is not None
    )
    return next(measured, _MEASURED[0])


def _located(content: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return `content` with the files that its choices name found from `folder`."""
    return {
        key: {**part, "file": str(folder / part["file"])}
        if isinstance(part, Mapping) and isinstance(part.get("file"), str)
        else part
        for key, part in content.items()
    }


def _find(name: str, geometry: Geometry | None, flag: str) -> PresetRef | None:
    try:
        return find_preset(name, geometry)
    except PresetFileError as error:
        raise _unreadable(flag, name, error, shipped=True) from error


def _no_preset(method: str, geometry: Geometry | None, flag: str) -> ConfigError:
    """Refuse a method whose presets were all made for other models."""
    refs = [ref for ref in list_presets() if ref.name == method]
    if geometry is None:
        problem = "each of its presets is made for one model, and no model is given"
    else:
        problem = f"it has no preset for {geometry.describe()}"
    model = "PATH" if geometry is None else geometry.name
    configs = [_validate(_preset_draft(ref, method, flag, method)) for ref in refs]
    axis = _measured_axis(configs[0])
    # A preset that has nothing measured yet, as `lserve` where all heads select, has no way to say.
    ways = {getattr(config, axis).how_to_measure(model, method) for config in configs} - {None}
    if len(ways) == 1:
        remedy = ways.pop()
    else:
        remedy = f"use {METHOD_FLAG} {CUSTOM} with a whole config in {CONFIG_FLAG}"
    return ConfigError(
        flag=flag,
        value=method,
        problem=problem,
        allowed=f"a model of the shape of {', '.join(ref.model for ref in refs)}, or {axis} of the "
        f"model's own in {CONFIG_FLAG}",
        remedy=remedy,
    )


def _named_preset_draft(method: str | None, name: str, geometry: Geometry | None) -> _Draft:
    ref = _find(name, geometry, CONFIG_FLAG)
    if ref is None and name in available_methods() and name != CUSTOM:
        raise _no_preset(name, geometry, CONFIG_FLAG)
    if ref is None:
        presets = ", ".join(map(str, list_presets()))
        raise ConfigError(
            flag=CONFIG_FLAG,
            value=name,
            problem="it is neither a preset's name, nor an existing file, nor inline JSON",
            allowed=f"a path that ends in .json, a JSON object, or one of {presets}",
            remedy="name one of these",
        )
    if method is not None and method not in (CUSTOM, ref.name):
        raise ConfigError(
            flag=CONFIG_FLAG,
            value=name,
            problem=f"that preset is not one of {METHOD_FLAG} {method}",
            allowed=f"a preset called {method}, a path, or inline JSON",
            remedy=f"drop {METHOD_FLAG}, or set it to {ref.name}",
        )
    return _preset_draft(ref, method or ref.name, CONFIG_FLAG, name)


def _preset_draft(ref: PresetRef, method: str, flag: str, value: str) -> _Draft:
    try:
        content = read_json_file(ref.path)
    except PresetFileError as error:
        raise _unreadable(flag, value, error, shipped=True) from error
    remedy = f"{ref.path} is damaged: {_REINSTALL}"
    located = _located(content, ref.path.parent)
    return _Draft(located, method, str(ref), flag, value, remedy, shipped_reach=True)


def _unreadable(flag: str, value: str, error: PresetFileError, *, shipped: bool) -> ConfigError:
    return ConfigError(
        flag=flag,
        value=value,
        problem=str(error),
        allowed="one JSON object" if shipped else "a preset's name, a path, or a JSON object",
        remedy=_REINSTALL if shipped else "correct it",
    )


def _validate(draft: _Draft) -> SparseConfig:
    try:
        return SparseConfig.model_validate(draft.content)
    except ValidationError as error:
        raise from_validation_error(
            error,
            flag=draft.flag,
            value=draft.value,
            key_sets=key_sets(),
            remedy=draft.remedy,
        ) from error


def _check_geometry(config: SparseConfig, geometry: Geometry, draft: _Draft) -> None:
    if config.model is not None and not config.model.matches(geometry):
        raise ConfigError(
            flag=draft.flag,
            value=draft.value,
            problem=f"it is for {config.model.describe()}, not for {geometry.describe()}",
            allowed=f"a config whose model has the same numbers, or has none ({GENERIC_MODEL}/...)",
            remedy=f"drop {CONFIG_FLAG}, so that {METHOD_FLAG} picks a preset that fits",
        )
    try:
        check_fits(config, geometry)
    except InvalidConfig as error:
        raise ConfigError(
            flag=draft.flag,
            value=draft.value,
            problem=error.problem,
            allowed=error.allowed,
            remedy=error.remedy,
        ) from error
