# SPDX-License-Identifier: Apache-2.0
"""Placement `host`: keys and values lie in host memory, frames on the device hold what is read.

PSA, arXiv:2503.00392, section 3.4.
"""

from typing import ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.choice import InvalidConfig, ModelShape
from sglang_sparse.choices.placement._placement import PlacedPoint, PlacementChoice

_DROP = "or drop placement"


class OnHost(PlacementChoice):
    """All keys and values lie in host memory; the device has planes and frames for what is read.

    Decoding loads the pages that it attends to and that are in no frame; the least recently used
    frames make room. Prompts attend to their prefix through a copy of one layer at a time.
    """

    on_host: ClassVar[bool] = True

    kind: Literal["host"] = "host"
    device_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Device memory for keys and values: frames, pages that are being written, and "
        "two layers of the longest request, for each prompt of a prefill batch "
        "(--prefill-max-requests, 1 unless set). Unset: frames for four steps of a full "
        "batch, or for two at least.",
    )
    host_bytes: int = Field(
        ge=1,
        description="Host memory for keys and values, pinned where the device is a GPU. "
        "max_total_num_tokens follows from it, and from the device memory that planes take.",
    )

    @property
    def room(self) -> tuple[int, int]:
        return (self.device_bytes or 0, self.host_bytes)

    def check(self, point: PlacedPoint) -> None:
        if point.retention.bounded or point.retention.by_head:
            raise InvalidConfig(
                f"retention.kind {point.retention.kind} holds less than placement.kind {self.kind} "
                "has room for",
                allowed="retention.kind all",
                remedy=f"drop retention, {_DROP}",
            )
        if any(point.heads.window):
            raise InvalidConfig(
                f"heads.kind {point.heads.kind} has windows, which are not looked up in frames "
                f"(placement.kind {self.kind})",
                allowed="heads.kind retrieval",
                remedy=f"drop heads, {_DROP}",
            )
        if point.unit == 1:
            raise InvalidConfig(
                f"score.kind {point.score.kind} selects single tokens, and each would take a frame "
                f"of page_size {point.page_size} tokens",
                allowed="a score of pages: page_minmax or page_mean",
                remedy=f"set score, {_DROP}",
            )
        if point.prefill.sparse_from is not None:
            raise InvalidConfig(
                f"prefill.kind {point.prefill.kind} does not go with placement.kind {self.kind}",
                allowed="prefill.kind dense",
                remedy=f"set prefill to dense, {_DROP}",
            )

    def check_model(self, point: PlacedPoint, model: ModelShape) -> None:
        for layer in range(model.num_hidden_layers):
            if point.layers.role(layer).source is None:
                raise InvalidConfig(
                    f"layer {layer} attends to every token, which frames do not hold",
                    allowed="layers that all attend to a selection: layers.kind every, or anchors "
                    "with first selection",
                    remedy=f"set layers.kind to every, or layers.first to selection, {_DROP}",
                )

    def check_request(self, *, dense: bool) -> None:
        if dense:
            raise InvalidConfig(
                "this server's keys and values lie in host memory, and frames on the device hold "
                "only what is selected",
                allowed="mode sparse",
                remedy="correct the request, or ask a server that holds them on the device",
            )
