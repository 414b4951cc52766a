# SPDX-License-Identifier: Apache-2.0
"""Retention `streaming_window`: streaming heads hold their sinks and window, the others everything.

DuoAttention (arXiv 2410.10819, section 2.3) and LServe (arXiv 2502.14866, section 3.3).
"""

from typing import ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.choice import InvalidConfig, ModelShape
from sglang_sparse.choices.interfaces import Point, RetentionChoice


class StreamingWindow(RetentionChoice):
    """KV heads that stream hold sinks and windows only; the others hold every token.

    So a streaming head sees its sinks and window always: in prompts as in decoding, in short
    requests as in long ones.
    """

    by_head: ClassVar[bool] = True

    kind: Literal["streaming_window"] = "streaming_window"
    share: float = Field(
        default=0.03125,
        gt=0.0,
        le=1.0,
        description="Tokens that streaming heads have room for, as a share of the tokens that the "
        "others have room for (max_total_num_tokens).",
    )

    @property
    def window_share(self) -> float:
        return self.share

    def check(self, point: Point) -> None:
        super().check(point)
        sink, local = point.heads.window
        if not local:
            raise InvalidConfig(
                f"retention.kind {self.kind} with heads.kind {point.heads.kind}, of which no head "
                "streams",
                allowed="heads.kind streaming",
                remedy="set heads, or drop retention",
            )
        if point.min_sparse_tokens > sink + local:
            raise InvalidConfig(
                f"min_sparse_tokens {point.min_sparse_tokens} is above heads.sink {sink} and "
                f"heads.local {local} together, and shorter requests attend to every token, which "
                "streaming heads do not hold",
                allowed=f"min_sparse_tokens from 1 to {sink + local}",
                remedy="lower min_sparse_tokens, or raise heads.local",
            )
        if point.prefill.sparse_from is not None:
            raise InvalidConfig(
                f"prefill.kind {point.prefill.kind} does not go with retention.kind {self.kind}",
                allowed="prefill.kind dense: streaming heads attend to windows in any case",
                remedy="set prefill to dense, or drop retention",
            )

    def check_model(self, point: Point, model: ModelShape) -> None:
        streaming = [point.heads.streams_in(layer) for layer in range(model.num_hidden_layers)]
        counts = {len(heads) for heads in streaming}
        if len(counts) > 1 or counts & {0, model.num_key_value_heads}:
            raise InvalidConfig(
                f"{min(counts)} to {max(counts)} of {model.num_key_value_heads} KV heads stream in "
                f"a layer, and retention.kind {self.kind} has one pool for all layers",
                allowed=f"the same number in each layer, 1 to {model.num_key_value_heads - 1}",
                remedy="find the heads with `sglang-sparse calibrate lserve --equal-per-layer`",
            )
        for layer in range(model.num_hidden_layers):
            role = point.layers.role(layer)
            if not role.selects or role.source != layer or role.heads is not None:
                raise InvalidConfig(
                    f"layer {layer} attends to every token or to another layer's lists, and "
                    "streaming heads hold only their windows",
                    allowed="layers.kind every",
                    remedy="set layers.kind to every, or drop retention",
                )

    def check_request(self, *, dense: bool, budget: float | None) -> None:
        if dense:
            raise InvalidConfig(
                "this server holds only sinks and windows of its streaming heads",
                allowed="mode sparse",
                remedy="correct the request, or ask a server that holds every token",
            )
