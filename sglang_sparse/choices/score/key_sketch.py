# SPDX-License-Identifier: Apache-2.0
"""Score `key_sketch`: partial q·k over the few channels where the query is largest (SparCas)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sglang_sparse.choices.choice import MAX_COUNT, InvalidConfig, ModelShape
from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import Plane


class KeySketch(ScoreChoice):
    """Partial q·k over the few channels where the query is largest (SparCas, section 3)."""

    kind: Literal["key_sketch"] = "key_sketch"
    channels: int = Field(default=16, ge=1, description="D_b: channels scored for one KV head.")
    refresh_every: int = Field(
        default=64,
        ge=1,
        le=MAX_COUNT,
        description="U: decode steps between two choices of the channels.",
    )
    storage: Literal["auto", "fp8", "int8", "int4", "bf16"] = Field(
        default="auto",
        description="Element type of the dimension-major copy of the keys; auto takes fp8, or int4 "
        "beside fp8 KV.",
    )
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @property
    def tile_pool(self) -> Literal["group"]:
        # The queries of a tile have their large values in different channels, so tiles use all of
        # K.
        return "group"

    @property
    def unit(self) -> int:
        return 1

    @property
    def refresh_steps(self) -> int:
        return self.refresh_every

    def planes(self) -> tuple[Plane, ...]:
        from sglang_sparse_radix.planes import SketchPlane

        return (SketchPlane(self.storage),)

    def check_model(self, model: ModelShape) -> None:
        if self.channels > model.head_dim:
            raise InvalidConfig(
                f"score.channels {self.channels} exceeds the head dimension of {model.describe()}",
                allowed=f"score.channels 1 to {model.head_dim}",
                remedy="lower score.channels",
            )

    def build(self, build: Build) -> KeySketchRun:
        return KeySketchRun(self, build)


class KeySketchRun:
    """Scores with the sketch; each request keeps its channels in every layer until a refresh."""

    def __init__(self, choice: KeySketch, build: Build) -> None:
        self._choice, self._build = choice, build

    def stage(self, layer: int) -> Stage:
        import torch

        from sglang_sparse_kernels.planes import KeySketch as SketchPlanes
        from sglang_sparse_kernels.step import SketchScore

        build, choice = self._build, self._choice
        values, scale = build.planes(layer, "key_sketch", "key_sketch_scale")
        assert values is not None
        shape = (build.pool.head_num, choice.channels)
        channels = build.columns.add(f"channels.{layer}", shape, torch.int32)
        sketch = SketchPlanes(values, scale, build.pool.page_size)
        return SketchScore(sketch, channels, choice.reduce, build.scores_of(layer))
