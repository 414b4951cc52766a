# SPDX-License-Identifier: Apache-2.0
"""Methods as data: one small frozen model a choice, presets in `configs/`, merged from two flags.

Imports pydantic alone, never sglang or torch.
"""

from sglang_sparse.config.axes import (
    Anchors,
    Calibration,
    DensePrefill,
    EveryLayer,
    Exact,
    FirstDense,
    FractionBudget,
    KeySketch,
    MassBudget,
    PageMean,
    PageMinMax,
    RetainAll,
    RetrievalHeads,
    Reuse,
    Role,
    StepCadence,
    TilePrefill,
    TokenBudget,
)
from sglang_sparse.config.errors import ConfigError
from sglang_sparse.config.load import (
    Resolved,
    available_methods,
    deep_merge,
    load_preset,
    resolve,
    resolve_with_source,
)
from sglang_sparse.config.model import (
    Geometry,
    SparseConfig,
    calibration_command,
    preset_hash,
)
from sglang_sparse.config.presets import PATTERN_MODEL, PresetRef, configs_dir, list_presets
from sglang_sparse.config.schema import json_schema, schema_text

__all__ = [
    "PATTERN_MODEL",
    "Anchors",
    "Calibration",
    "ConfigError",
    "DensePrefill",
    "EveryLayer",
    "Exact",
    "FirstDense",
    "FractionBudget",
    "Geometry",
    "KeySketch",
    "MassBudget",
    "PageMean",
    "PageMinMax",
    "PresetRef",
    "Resolved",
    "RetainAll",
    "RetrievalHeads",
    "Reuse",
    "Role",
    "SparseConfig",
    "StepCadence",
    "TilePrefill",
    "TokenBudget",
    "available_methods",
    "calibration_command",
    "configs_dir",
    "deep_merge",
    "json_schema",
    "list_presets",
    "load_preset",
    "preset_hash",
    "resolve",
    "resolve_with_source",
    "schema_text",
]
