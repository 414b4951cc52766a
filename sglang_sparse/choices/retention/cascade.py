# SPDX-License-Identifier: Apache-2.0
"""Retention `cascade`: sinks, sub-caches that thin out with age, and the open stride.

Cascading KV Cache, arXiv:2406.17808, section 3.2 and algorithms 1 and 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.choices.choice import MAX_COUNT, InvalidConfig
from sglang_sparse.choices.interfaces import BoundedRetention, Point

if TYPE_CHECKING:
    from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape

_OWN = ("sink_tokens", "recent_tokens", "min_sparse_tokens", "cadence", "inner")


class Cascade(BoundedRetention):
    """A bounded number of tokens a request, whatever its length.

    Held are `sinks` first tokens, `levels` sub-caches of `window / levels` tokens, and the stride
    that is being filled. Level i takes every 2^i-th token; of two that compete, the one with the
    higher moving average of attention stays.
    """

    kind: Literal["cascade"] = "cascade"
    window: int = Field(ge=1, le=MAX_COUNT, description="Tokens of all sub-caches together.")
    sinks: int = Field(default=64, ge=0, le=MAX_COUNT, description="First tokens, always held.")
    levels: int = Field(
        default=4, ge=1, le=16, description="Sub-caches; 1 is a window behind the sinks."
    )
    stride: int = Field(
        ge=1, le=MAX_COUNT, description="Tokens between two evictions; prompts attend in strides."
    )
    beta: float = Field(
        default=0.9999,
        gt=0,
        lt=1,
        description="Share of the old value in the moving average of attention.",
    )
    reduce: Literal["mean", "max"] = Field(
        default="mean", description="How the query heads of one KV head pool their attention."
    )

    snapshots: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="States of prefixes that are kept for later requests that begin alike.",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        least = max(self.sinks, 1)
        if self.window < least:
            raise InvalidConfig(
                f"retention.window {self.window} is below retention.sinks {self.sinks}",
                allowed=f"retention.window of at least {least}",
                remedy="raise retention.window, or lower retention.sinks",
            )
        for key, size in (("stride", self.stride), ("levels", self.levels)):
            if self.window % size:
                raise InvalidConfig(
                    f"retention.{key} {size} does not divide retention.window {self.window}",
                    allowed=f"retention.window a multiple of retention.{key}",
                    remedy=f"change retention.{key} or retention.window",
                )
        pairs = 1 << (self.levels - 1)
        if self.stride % pairs:
            raise InvalidConfig(
                f"retention.stride {self.stride} is not a multiple of {pairs}, and the last of "
                f"{self.levels} levels takes every {pairs}-th token",
                allowed=f"retention.stride a multiple of {pairs}",
                remedy="raise retention.stride, or lower retention.levels",
            )
        return self

    @property
    def most_tokens(self) -> int:
        return self.sinks + self.window + self.stride

    def check(self, point: Point) -> None:
        super().check(point)
        given = sorted(set(_OWN) & point.model_fields_set)
        if given or point.prefill.most_chunk is not None:
            names = ", ".join(given or ["prefill"])
            raise InvalidConfig(
                f"{names} means nothing under retention.kind {self.kind}",
                allowed="the keys of retention, and page_size",
                remedy=f"leave out {names}",
            )

        if self.snapshots and (self.sinks % point.page_size or self.stride % point.page_size):
            raise InvalidConfig(
                f"retention.snapshots {self.snapshots} are taken where strides close, and "
                f"retention.sinks {self.sinks} or retention.stride {self.stride} is no multiple of "
                f"page_size {point.page_size}",
                allowed="retention.sinks and retention.stride that are multiples of page_size",
                remedy="change them or page_size, or set retention.snapshots to 0",
            )

    @property
    def kept_prefixes(self) -> int:
        return self.snapshots

    def check_request(self, *, dense: bool, budget: float | None) -> None:
        held = f"this server holds at most {self.most_tokens} tokens of a request"
        if dense or budget is not None:
            raise InvalidConfig(
                f"{held}, and attends to all of them",
                allowed="mode sparse without a budget",
                remedy="correct the request, or ask a server that holds every token",
            )

    def shape(self) -> CascadeShape:
        """The cache's shape for the kernels."""
        from sglang_sparse_kernels.cascade import CascadeShape

        return CascadeShape(self.window, self.sinks, self.levels, self.stride)

    def average(self) -> AttentionAverage:
        """How scores follow from attention."""
        from sglang_sparse_kernels.cascade import AttentionAverage

        return AttentionAverage(self.beta, self.reduce)
