# SPDX-License-Identifier: Apache-2.0
"""Methods as data: a small frozen model for each choice, presets in `configs/`, and two flags.

It imports pydantic alone, never sglang or torch.
"""

from sglang_sparse.choices.budget.fraction import FractionBudget
from sglang_sparse.choices.budget.mass import MassBudget
from sglang_sparse.choices.budget.tokens import TokenBudget
from sglang_sparse.choices.cadence import StepCadence
from sglang_sparse.choices.choice import InvalidConfig
from sglang_sparse.choices.heads._files import read_gates
from sglang_sparse.choices.heads.retrieval import RetrievalHeads
from sglang_sparse.choices.heads.streaming import HeadsCalibration, HeadsModel, StreamingHeads
from sglang_sparse.choices.layers.anchors import (
    Anchors,
    Calibration,
    Reuse,
    calibration_command,
)
from sglang_sparse.choices.layers.every import EveryLayer
from sglang_sparse.choices.layers.first_dense import FirstDense
from sglang_sparse.choices.prefill.dense import DensePrefill
from sglang_sparse.choices.prefill.tile_topk import TilePrefill
from sglang_sparse.choices.score.exact import Exact
from sglang_sparse.choices.score.key_sketch import KeySketch
from sglang_sparse.choices.score.page_mean import PageMean
from sglang_sparse.choices.score.page_minmax import PageMinMax
from sglang_sparse.config.errors import ConfigError
from sglang_sparse.config.load import (
    Resolved,
    available_methods,
    deep_merge,
    load_preset,
    resolve,
    resolve_with_source,
)
from sglang_sparse.config.model import Geometry, SparseConfig, preset_hash
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
    "HeadsCalibration",
    "HeadsModel",
    "InvalidConfig",
    "KeySketch",
    "MassBudget",
    "PageMean",
    "PageMinMax",
    "PresetRef",
    "Resolved",
    "RetrievalHeads",
    "Reuse",
    "SparseConfig",
    "StepCadence",
    "StreamingHeads",
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
    "read_gates",
    "resolve",
    "resolve_with_source",
    "schema_text",
]
